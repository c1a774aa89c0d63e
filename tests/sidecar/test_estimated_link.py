"""What a plain engine's metrics page tells as time passes corrects the estimate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from cacheaware_api import wire
from cacheaware_sidecar.block_budget import BlockBudget, Demand, Fit
from cacheaware_sidecar.budget import SlotBudget
from cacheaware_sidecar.estimated_link import EstimatedLink
from cacheaware_sidecar.testing import StubEngine, plain_vllm_page
from cacheaware_sidecar.testing_sidecar import eventually, view


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    async with StubEngine(None) as engine:
        engine.metrics_page = plain_vllm_page(101)
        yield engine


@pytest.fixture
def budget() -> SlotBudget:
    return SlotBudget(blocks=BlockBudget())


@pytest.fixture
async def link(engine: StubEngine, budget: SlotBudget) -> AsyncIterator[EstimatedLink]:
    """Applied already; it looks at the page many times a second."""

    def nothing(*_: wire.Ledger) -> None: ...

    async with aiohttp.ClientSession() as session:
        link = EstimatedLink(
            session, engine.url, budget, sequences=8, on_ledger=nothing, on_restart=nothing, every=0.01
        )
        link.want(view())
        task = asyncio.create_task(link.run())
        await eventually(lambda: link.state.ready)
        yield link
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def blocks(budget: SlotBudget) -> BlockBudget:
    assert budget.blocks is not None
    return budget.blocks


async def test_a_preemption_makes_estimates_longer_and_quiet_makes_them_shorter_again(
    engine: StubEngine, budget: SlotBudget, link: EstimatedLink
) -> None:
    assert blocks(budget).caution == 1.0
    engine.metrics_page = plain_vllm_page(101, preemptions=3)
    await eventually(lambda: blocks(budget).caution > 1.09)
    highest = blocks(budget).caution
    await eventually(lambda: blocks(budget).caution < highest)


async def test_many_preemptions_do_not_make_it_refuse_everything(
    engine: StubEngine, budget: SlotBudget, link: EstimatedLink
) -> None:
    for number in range(1, 30):
        before = blocks(budget).caution
        engine.metrics_page = plain_vllm_page(101, preemptions=number)
        await eventually(lambda before=before: blocks(budget).caution > before or before > 1.98)  # type: ignore[misc]
    assert blocks(budget).caution <= 2.0


async def test_what_the_engine_holds_beyond_the_estimates_is_not_lent(
    engine: StubEngine, budget: SlotBudget, link: EstimatedLink
) -> None:
    budget.reserve("runs", "gold", 1, Demand(prompt=16, output=16))
    wanted = Demand(prompt=39 * 16, output=16)  # ten more than bronze's nominal
    assert blocks(budget).fit("bronze", wanted) is Fit.BORROWS
    engine.metrics_page = plain_vllm_page(101, usage=0.9)
    await eventually(lambda: blocks(budget).fit("bronze", wanted) is Fit.NO_ROOM)
    engine.metrics_page = plain_vllm_page(101, usage=0.02)
    await eventually(lambda: blocks(budget).fit("bronze", wanted) is Fit.BORROWS)


@pytest.mark.parametrize("page", ["", "half a page {", "vllm:num_requests_waiting 0.0\n"])
async def test_half_a_page_takes_nothing_away(
    engine: StubEngine, budget: SlotBudget, link: EstimatedLink, page: str
) -> None:
    budget.reserve("runs", "gold", 1, Demand(prompt=16, output=16))
    before = link.ledger
    assert before is not None
    engine.metrics_page = page
    await eventually(lambda: (now := link.ledger) is not None and now.sequence > before.sequence + 2)
    after = link.ledger
    assert after is not None
    assert (after.capacity, after.tiers["gold"].held) == (100, 2)
