"""What a step computes, in what order requests start, and how they end when there is no room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cacheaware_api.wire import Quotas, Revision, TierQuota
from cacheaware_engine.engine_testing import GREEDY, SteppedEngine
from cacheaware_engine.engine_thread import EngineThread
from cacheaware_engine.errors import BadRequest
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.outbox import Outbox
from cacheaware_engine.requests import Delta, Finish, Generation, RequestId, Submission, request_ids
from cacheaware_engine.runner import ModelRunner, SequenceWork, StepOutput


class RecordingRunner:
    """A model that remembers how many tokens of how many sequences each step computed."""

    def __init__(self, runner: ModelRunner, steps: list[list[int]]) -> None:
        self._runner = runner
        self._steps = steps
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.bytes_per_token, self.kv_form = runner.bytes_per_token, runner.kv_form

    def forward(self, work: Sequence[SequenceWork]) -> StepOutput:
        self._steps.append([len(item.tokens) for item in work])
        return self._runner.forward(work)

    def copy_block(self, source: int, target: int) -> None:
        self._runner.copy_block(source, target)


def quotas(number: int = 1, **limits: tuple[int, int]) -> Quotas:
    """Tiers by name with their nominal share and limit, in blocks."""
    tiers = tuple(
        TierQuota(name, priority=0, weight=1, nominal=nominal, effective=nominal, limit=limit, lending=nominal)
        for name, (nominal, limit) in limits.items()
    )
    return Quotas(Revision("pool", number), tiers, public=0)


def test_decodes_go_first_and_prompts_fill_what_is_left_of_a_step(tiny: LoadedModel) -> None:
    steps: list[list[int]] = []
    engine = SteppedEngine(
        tiny, num_blocks=80, max_num_batched_tokens=16, wrap=lambda runner: RecordingRunner(runner, steps)
    )
    reading = engine.submit([1] * 3, 20)
    engine.step()
    engine.submit([2] * 40, 4)
    engine.submit([3] * 5, 4)
    for count in range(2, 5):
        engine.step()
        assert len(reading.tokens()) == count, "a long prompt holds up nobody's next token"
    assert steps[:4] == [[3], [1, 15], [1, 15], [1, 10, 5]]
    engine.run()
    assert max(map(sum, steps)) <= 16


def test_requests_start_in_the_order_of_their_arrival(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=80, max_num_seqs=1)
    outputs = [engine.submit([number] * 5, 3) for number in range(4)]
    started: list[int] = []
    while engine.engine.busy:
        engine.step()
        started += [number for number, output in enumerate(outputs) if output.tokens() and number not in started]
    assert started == [0, 1, 2, 3]


def test_a_long_queue_is_served_whole_and_a_step_offers_only_some_of_it(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=200, max_num_seqs=4)
    engine.engine.set_quotas(quotas(big=(0, 200), small=(100, 200)))
    outputs = [engine.submit([number] * 5, 2, tier="big") for number in range(200)]
    late = engine.submit([250] * 5, 2, tier="small")
    engine.step()
    assert late.tokens(), "a long queue of one tier does not stand in front of another's"
    engine.run()
    assert all(len(output.tokens()) == 2 for output in outputs)
    engine.assert_empty()


async def test_priority_decides_only_between_requests_that_arrive_for_the_same_step(tiny: LoadedModel) -> None:
    stepped = SteppedEngine(tiny, num_blocks=80, max_num_seqs=1)
    thread = EngineThread(stepped.engine, lambda death: None)
    started: list[str] = []

    async def call(name: str, priority: int) -> None:
        outbox = thread.outbox(1)
        generation = Generation(GREEDY, max_tokens=3, ignore_eos=True)
        await thread.submit(Submission(RequestId(name), "t", (5,), generation, priority=priority), outbox)
        await outbox.take()
        started.append(name)
        while await outbox.take():
            pass

    calls = [asyncio.create_task(call(name, priority)) for name, priority in (("late", 5), ("first", -5), ("next", 0))]
    await asyncio.sleep(0)  # all three are given before there is a step
    thread.start()
    await asyncio.gather(*calls)
    await thread.stop()
    assert started == ["first", "next", "late"]


def test_an_idle_engine_serves_what_lending_would_not_allow(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=20)
    engine.engine.set_quotas(quotas(gold=(12, 20), bronze=(0, 20)))
    output = engine.submit([1] * 40, 10, tier="bronze")
    engine.run()
    assert len(output.tokens()) == 10


def test_a_request_alone_at_its_tiers_limit_ends_with_length(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=40)
    engine.engine.set_quotas(quotas(small=(6, 6), other=(20, 40)))
    output = engine.submit([1] * 8, 100, tier="small")
    engine.run()
    assert output.finish() is Finish.LENGTH
    assert output.error is None
    assert len(output.tokens()) == 6 * 4 - 8 + 1  # the last token needs no block
    engine.assert_empty()


def test_a_sequence_that_ends_at_the_limit_leaves_its_siblings_the_room(tiny: LoadedModel) -> None:
    from cacheaware_engine.sampling_params import SamplingParams

    engine = SteppedEngine(tiny, num_blocks=40)
    engine.engine.set_quotas(quotas(small=(12, 12), other=(20, 40)))
    output = engine.submit([1] * 8, 60, tier="small", n=3, sampling=SamplingParams(temperature=1.0, seed=1))
    engine.run()
    assert [output.finish(index) for index in range(3)] == [Finish.LENGTH] * 3
    lengths = sorted(len(output.tokens(index)) for index in range(3))
    assert lengths[0] < lengths[-1]
    engine.assert_empty()


def test_a_waiter_that_no_longer_fits_is_refused_with_the_arithmetic(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=30)
    engine.engine.set_quotas(quotas(a=(15, 30), b=(15, 30)))
    running = engine.submit([1] * 60, 20, tier="a")
    engine.step()
    waiter = engine.submit([2] * 80, 10, tier="b")
    engine.step()
    assert waiter.closed == 0
    engine.engine.set_quotas(quotas(2, a=(15, 30), b=(10, 10)))
    engine.run()
    assert isinstance(waiter.error, BadRequest)
    assert "10" in waiter.error.message
    assert len(running.tokens()) == 20
    engine.assert_empty()


def test_what_was_yielded_and_no_longer_fits_ends_with_length(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=30)
    engine.engine.set_quotas(quotas(a=(20, 30), b=(5, 30)))
    borrower = engine.submit([2] * 50, 60, tier="b")
    for _ in range(5):
        engine.step()
    entitled = engine.submit([1] * 70, 20, tier="a")
    while not engine.preemptions:
        engine.step()
    said = len(borrower.tokens())
    engine.engine.set_quotas(quotas(2, a=(20, 30), b=(5, 5)))
    engine.run()
    assert (borrower.finish(), borrower.error, len(borrower.tokens())) == (Finish.LENGTH, None, said)
    assert len(entitled.tokens()) == 20
    engine.assert_empty()


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_min_tokens_and_stop_strings(tiny: LoadedModel, tokens: int) -> None:
    """A stop string that begins before min_tokens is no stop."""
    engine = SteppedEngine(tiny, num_blocks=60)
    free = engine.submit([7] * 5, 40)
    engine.run()
    text = "".join(delta.text for delta in free.deltas[: tokens + 1])
    output = engine.submit([7] * 5, 40, stop=(text[-1:] or "x",), min_tokens=tokens)
    engine.run()
    assert len(output.tokens()) >= tokens
    assert free.text().startswith(output.text())


def test_ids_are_never_prefixes_of_each_other() -> None:
    mint, other = request_ids(), request_ids()
    ids = [mint() for _ in range(300)] + [other() for _ in range(3)]
    assert len({*ids}) == len(ids)
    assert len({len(name) for name in ids}) == 1


# -- the outbox -------------------------------------------------------------------------------------------------------


async def test_what_was_not_taken_is_merged() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    for letter in "abc":
        outbox.post([Delta(0, letter, (ord(letter),)), Delta(1, letter.upper(), (1,))])
    outbox.post([Delta(0, "", (), Finish.STOP)])
    first, second = await outbox.take()
    assert (first.text, first.tokens, first.finish) == ("abc", (97, 98, 99), Finish.STOP)
    assert (second.text, second.finish) == ("ABC", None)


async def test_a_reader_gets_what_is_there_then_the_end() -> None:
    outbox = Outbox(asyncio.get_running_loop(), requests=2)
    outbox.post([Delta(0, "a", (1,))])
    outbox.close()
    assert [delta.text for delta in await outbox.take()] == ["a"]
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done(), "the other request has not ended"
    outbox.post([Delta(1, "b", (1,))])
    outbox.close()
    assert [delta.text for delta in await waiting] == ["b"]
    assert await outbox.take() == []


async def test_a_reader_gets_what_is_there_then_the_error() -> None:
    outbox = Outbox(asyncio.get_running_loop(), requests=2)
    outbox.post([Delta(0, "a", (1,))])
    outbox.close(BadRequest("no"))
    assert len(await outbox.take()) == 1
    with pytest.raises(BadRequest):
        await outbox.take()


async def test_a_reader_and_a_writer_on_two_threads_lose_nothing() -> None:
    outbox = Outbox(asyncio.get_running_loop())

    def write() -> None:
        for number in range(3000):
            outbox.post([Delta(0, f"{number} ", (number,))])
        outbox.close()

    writing = asyncio.create_task(asyncio.to_thread(write))
    tokens: list[int] = []
    while deltas := await outbox.take():
        tokens += [token for delta in deltas for token in delta.tokens]
    await writing
    assert tokens == list(range(3000))


def test_prompts_with_one_prefix_that_arrive_together_compute_it_once(tiny: LoadedModel) -> None:
    steps: list[list[int]] = []
    engine = SteppedEngine(
        tiny, num_blocks=120, max_num_batched_tokens=32, wrap=lambda runner: RecordingRunner(runner, steps)
    )
    prefix = [number % 200 for number in range(48)]  # twelve blocks
    outputs = [engine.submit([*prefix, 201 + member, 9, 9, 9, 9], 1) for member in range(6)]
    engine.run()
    assert sum(map(sum, steps)) == 48 + 6 * 5, "the prefix by one of them, and what is each one's own"
    assert all(len(output.tokens()) == 1 for output in outputs)
    engine.assert_empty()


def test_the_text_of_those_who_waited_for_a_prefix_is_the_one_they_write_alone(tiny: LoadedModel) -> None:
    prompts = [[*range(50, 70), 100 + member] for member in range(4)]
    together = SteppedEngine(tiny, num_blocks=120, max_num_batched_tokens=16)
    outputs = [together.submit(prompt, 12) for prompt in prompts]
    together.run()
    for prompt, output in zip(prompts, outputs, strict=True):
        alone = SteppedEngine(tiny, num_blocks=40)
        expected = alone.submit(prompt, 12)
        alone.run()
        assert output.tokens() == expected.tokens()


def test_when_the_one_who_computes_a_prefix_is_aborted_another_goes_on(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=120, max_num_batched_tokens=16)
    engine.submit([7] * 60, 4, request_id="first")
    follower = engine.submit([7] * 60 + [8], 4)
    engine.step()
    engine.engine.abort(RequestId("first"))
    engine.run()
    assert len(follower.tokens()) == 4
    engine.assert_empty()


def test_two_borrowers_make_room_once_each_and_the_one_it_was_for_runs_to_its_end(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=60)
    engine.engine.set_quotas(quotas(gold=(50, 60), bronze=(4, 60), iron=(4, 60)))
    borrowers = [engine.submit([number] * 80, 40, tier=tier) for number, tier in enumerate(("bronze", "iron"), start=1)]
    for _ in range(3):
        engine.step()
    assert all(output.tokens() for output in borrowers), "both run, far beyond their nominal"
    gold = engine.submit([9] * 160, 30, tier="gold")
    for _ in range(100):
        engine.step()
    assert len(gold.tokens()) == 30, "nobody takes it back while it runs"
    engine.run()
    assert [len(output.tokens()) for output in borrowers] == [40, 40]
    accounts = engine.pool.ledger().tiers
    assert {name: accounts[name].preempted_total for name in accounts} == {"gold": 0, "bronze": 1, "iron": 1}
    engine.assert_empty()


def test_an_important_request_gets_a_slot_from_four_that_best_effort_filled(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=80, max_num_seqs=4)
    engine.engine.set_quotas(quotas(critical=(40, 80), batch=(0, 80)))
    slow = [engine.submit([number] * 6, 40, tier="batch") for number in range(4)]
    engine.step()
    assert all(output.tokens() for output in slow), "all four slots are taken"
    urgent = engine.submit([99] * 6, 2, tier="critical")
    engine.step()
    assert urgent.tokens(), "it does not wait for one of them to end"
    engine.run()
    assert all(len(output.tokens()) == 40 for output in slow), "who made room goes on where it was"
    engine.assert_empty()
