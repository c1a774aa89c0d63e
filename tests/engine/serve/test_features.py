"""Whatever of the engine's lossless features is on, and whatever else is in the batch, a prompt has the text that it
has alone with everything off."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cacheaware_api.wire import GroupHint, Hints, Quotas, Revision, TierQuota
from cacheaware_engine.attention_costs import SEPARATELY, TOGETHER, AttentionCosts
from cacheaware_engine.engine_testing import Output, SteppedEngine
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.testing import native_here

SOMETIMES = AttentionCosts(own_token=1.0, call=40.0, token=0.2, row=0.1)
LONGEST = 12


@dataclass(frozen=True, slots=True)
class Features:
    costs: AttentionCosts  # reading prefixes together, and stretches in place
    native: bool  # attention of decodes by the native library
    chunk: int  # tokens of a step
    blocks: int  # few: texts are preempted and computed again
    block_size: int
    running: int
    hints: bool  # blocks set aside for groups
    promised: float | None  # chunks as large as a promise leaves time for
    copied_slots: int  # gathered and widened in pieces
    salted: bool  # nothing is hit


@dataclass(frozen=True, slots=True)
class Asked:
    family: int
    shared: int
    own: int
    tokens: int
    choices: int
    arrives: int  # at which step
    reports: bool  # tells of its prompt, so takes nothing from the cache

    @property
    def prompt(self) -> tuple[int, ...]:
        rng, own = random.Random(self.family), random.Random(f"{self.family} {self.own}")
        return (*(rng.randrange(200) for _ in range(self.shared)), *(own.randrange(200) for _ in range(self.own)))


features = st.builds(
    Features,
    costs=st.sampled_from([TOGETHER, SEPARATELY, SOMETIMES]),
    native=st.booleans(),
    chunk=st.sampled_from([8, 24, 256]),
    blocks=st.sampled_from([1, 2, 6]),
    block_size=st.sampled_from([1, 4, 16]),
    running=st.sampled_from([3, 8]),
    hints=st.booleans(),
    promised=st.sampled_from([None, 1e-9, 10.0]),
    copied_slots=st.sampled_from([1, 16, 4096]),
    salted=st.booleans(),
)
requests = st.lists(
    st.builds(
        Asked,
        family=st.integers(0, 2),
        shared=st.sampled_from([0, 17, 48]),
        own=st.integers(1, 20),
        tokens=st.integers(1, LONGEST),
        choices=st.sampled_from([1, 1, 1, 2]),
        arrives=st.integers(0, 8),
        reports=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=8,
)
ALONE: dict[tuple[int, ...], list[int]] = {}


def alone(tiny: LoadedModel, prompt: tuple[int, ...]) -> list[int]:
    if prompt not in ALONE:
        engine = SteppedEngine(tiny, num_blocks=60, block_size=4, max_num_batched_tokens=256, costs=SEPARATELY)
        output = engine.submit(prompt, LONGEST)
        engine.run()
        ALONE[prompt] = output.tokens()
    return ALONE[prompt]


# As many choices as the prompt has tokens: as many rows are sampled as there are logits, and not the same ones.
AS_MANY_CHOICES_AS_TOKENS = Asked(family=0, shared=0, own=2, tokens=1, choices=2, arrives=0, reports=True)
PLAIN = Features(
    TOGETHER, False, 8, blocks=1, block_size=1, running=3, hints=False, promised=None, copied_slots=1, salted=False
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(features=features, requests=requests)
@example(features=PLAIN, requests=[AS_MANY_CHOICES_AS_TOKENS])
def test_texts_do_not_depend_on_features_or_company(
    tiny: LoadedModel, features: Features, requests: list[Asked]
) -> None:
    longest = -(-(48 + 20 + LONGEST) // features.block_size) + 1
    engine = SteppedEngine(
        tiny,
        num_blocks=2 * longest + features.blocks * longest,
        block_size=features.block_size,
        max_num_seqs=features.running,
        max_num_batched_tokens=max(features.chunk, features.running),
        costs=features.costs,
        native=native_here() if features.native else None,
    )
    engine.runner._store.copied_slots = engine.runner._store.gathered_slots = features.copied_slots
    blocks = engine.pool.capacity
    tier = TierQuota("gold", 1, 1, blocks, blocks, blocks, blocks, time_per_output_token_s=features.promised)
    engine.engine.set_quotas(Quotas(Revision("p", 1), (tier,), public=0))
    if features.hints:
        engine.engine.set_hints(Hints({"g": GroupHint(blocks, ttl_s=60.0)}))
    outputs: list[tuple[Asked, Output]] = []
    for step in range(9):
        for number, asked in enumerate(requests):
            if asked.arrives == step:
                output = engine.submit(
                    asked.prompt,
                    asked.tokens,
                    tier="gold",
                    n=asked.choices,
                    salt=bytes([number]) if features.salted else b"",
                    prompt_logprobs=1 if asked.reports else None,
                )
                outputs.append((asked, output))
        engine.step()
    engine.run()
    for asked, output in outputs:
        for choice in range(asked.choices):
            assert output.tokens(choice) == alone(tiny, asked.prompt)[: asked.tokens], (asked, choice)
    engine.assert_empty()
