"""Minutes of random arrivals, cancellations, changing quotas and preemptions: no wrong token, no lost block, no leak.

`SOAK_SECONDS` says how long it runs: a few seconds unless it is set; CI runs 180, a release 1800.
"""

from __future__ import annotations

import gc
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cacheaware_api.wire import GroupHint, Hints, Quotas, Revision, TierQuota
from cacheaware_engine.engine_testing import GREEDY, Output, SteppedEngine, load_for_test
from cacheaware_engine.errors import BadRequest
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.requests import Generation, RequestId, Submission
from cacheaware_engine.testing import native_here, save_tiny_model

SECONDS = float(os.environ.get("SOAK_SECONDS", "6"))
BLOCKS = 90
LONGEST = 24


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: tuple[int, ...]
    output: Output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_for_test(save_tiny_model(tmp_path_factory.mktemp("soak") / "tiny"))


class Alone:
    """What a prompt's text is when nothing else runs: the longest that is asked for, computed once."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def text(self, prompt: tuple[int, ...]) -> list[int]:
        if prompt not in self._texts:
            engine = SteppedEngine(self._model, num_blocks=60)
            output = engine.submit(prompt, LONGEST)
            engine.run()
            self._texts[prompt] = output.tokens()
        return self._texts[prompt]


def quotas(number: int, rng: random.Random) -> Quotas:
    gold = rng.randint(0, 60)
    bronze = rng.randint(0, BLOCKS - gold)
    return Quotas(
        Revision("soak", number),
        tuple(
            TierQuota(
                name,
                priority=priority,
                weight=1,
                nominal=nominal,
                effective=nominal,
                limit=rng.randint(max(nominal, 40), BLOCKS),
                lending=rng.randint(0, nominal),
                retention_s=rng.choice([None, 0.0, 0.2]),
            )
            for name, nominal, priority in (("gold", gold, 100), ("bronze", bronze, 0))
        ),
        public=0,
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(SECONDS * 4 + 300)
def test_nothing_is_wrong_lost_or_leaked(model: LoadedModel) -> None:
    torch.set_num_threads(1)
    rng = random.Random(SECONDS)
    prompts = [
        (*prefix, *(rng.randrange(200) for _ in range(rng.randint(1, 12))))
        for prefix in [tuple(rng.randrange(200) for _ in range(length)) for length in (0, 17, 48, 64)]
        for _ in range(6)
    ]
    alone = Alone(model)
    for prompt in prompts:
        alone.text(prompt)
    engine = SteppedEngine(model, num_blocks=BLOCKS, max_num_batched_tokens=40, native=native_here())
    live: dict[RequestId, Asked] = {}
    texts = cancelled = refused = 0
    memory: list[int] = []
    deadline = time.monotonic() + SECONDS
    number = 0
    while time.monotonic() < deadline or number < 400:
        number += 1
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            if len(live) < 30:
                prompt, request_id = rng.choice(prompts), RequestId(f"s{number}-{len(live)}-{rng.random()}")
                wanted = Generation(GREEDY, rng.randint(1, LONGEST), ignore_eos=True)
                output = Output()
                submission = Submission(request_id, rng.choice(["gold", "bronze"]), prompt, wanted, group="g")
                try:
                    engine.engine.submit(submission, output)
                    live[request_id] = Asked(prompt, output)
                except BadRequest:
                    refused += 1
        if live and rng.random() < 0.1:
            chosen = rng.choice(list(live))
            engine.engine.abort(chosen)
            cancelled += 1
        if rng.random() < 0.02:
            engine.engine.set_quotas(quotas(number, rng))
        if rng.random() < 0.02:
            engine.engine.set_hints(Hints({"g": GroupHint(rng.randint(0, 20), ttl_s=0.5)}))
        engine.step()
        for request_id in [request_id for request_id, asked in live.items() if asked.output.closed]:
            asked = live.pop(request_id)
            tokens = asked.output.tokens()
            assert tokens == alone.text(asked.prompt)[: len(tokens)], "the text that the prompt has alone"
            texts += 1
        if number % 50 == 0:
            engine.engine.check_integrity()
        if number % 500 == 0:
            gc.collect()
            memory.append(resident_bytes())
    for request_id in list(live):
        engine.engine.abort(request_id)
    engine.assert_empty()
    assert texts > 50, (texts, cancelled, refused)
    if len(memory) > 20:
        early, late = sorted(memory[5:10])[2], sorted(memory[-5:])[2]
        assert late < early + 32 * 2**20, f"memory grew from {early:,} to {late:,} bytes"
