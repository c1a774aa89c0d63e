"""Who leads: one at a time, whatever fails, and another soon. In virtual time, on an API server of dictionaries."""

import asyncio
import copy
import random
from datetime import UTC, datetime
from typing import Any

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_operator.errors import ApiRefused, ApiUnreachable, LeadershipLost
from cacheaware_operator.kinds import Object
from cacheaware_operator.leader import DURATION, RENEW_WITHIN, RETRY, Leadership, Seen, Step, held, may_lead, next_step

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def lease(holder: str, version: str = "1", duration: int = int(DURATION)) -> dict[str, Any]:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": duration}
    return {"metadata": {"name": "l", "namespace": "n", "resourceVersion": version}, "spec": spec}


# -- the state machine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "seen", "now", "step"),
    [
        pytest.param(None, None, 0.0, Step.CREATE, id="there is none"),
        pytest.param(lease("me"), None, 0.0, Step.TAKE, id="ours, from before a restart"),
        pytest.param(lease(""), None, 0.0, Step.TAKE, id="given up"),
        pytest.param(lease("you"), None, 1e9, Step.WAIT, id="another's, seen for the first time"),
        pytest.param(lease("you"), Seen("1", 0.0), DURATION - 0.1, Step.WAIT, id="another's, not over yet"),
        pytest.param(lease("you"), Seen("1", 0.0), DURATION, Step.TAKE, id="another's, unchanged for its duration"),
        pytest.param(lease("you", "2"), Seen("1", 0.0), 1e9, Step.WAIT, id="another's, renewed since"),
        pytest.param(lease("you", duration=60), Seen("1", 0.0), 59.0, Step.WAIT, id="by the duration it names"),
    ],
)
def test_a_lease_is_taken_only_when_nobody_can_hold_it(
    found: dict[str, Any] | None, seen: Seen | None, now: float, step: Step
) -> None:
    assert next_step(found, seen, "me", now)[0] is step


def test_the_holder_stops_before_another_may_begin() -> None:
    assert may_lead(0.0, RENEW_WITHIN - 0.01)
    assert not may_lead(0.0, RENEW_WITHIN)
    assert RENEW_WITHIN + RETRY < DURATION
    assert DURATION + RETRY < 30


def test_taking_a_lease_counts_a_transition_and_renewing_does_not() -> None:
    first = held(None, "me", "l", "n", NOW)
    assert first["spec"]["leaseTransitions"] == 0
    assert held(first, "me", "l", "n", NOW)["spec"]["leaseTransitions"] == 0
    assert held(first, "you", "l", "n", NOW)["spec"]["leaseTransitions"] == 1


# -- several of them --------------------------------------------------------------------------------------------------


class Server:
    """Holds one Lease. `away` has who cannot reach it; every request takes `delay()` seconds each way."""

    def __init__(self, delay: Any = lambda: 0.0) -> None:
        self.lease: dict[str, Any] | None = None
        self.away: set[str] = set()
        self._version = 0
        self._delay = delay

    def of(self, identity: str) -> "Client":
        return Client(self, identity)

    async def call(self, identity: str, act: Any) -> Any:
        await asyncio.sleep(self._delay())
        if identity in self.away:
            raise ApiUnreachable("away")
        answer = act()
        await asyncio.sleep(self._delay())
        if identity in self.away:
            raise ApiUnreachable("the answer is lost")
        return answer

    def write(self, written: Object) -> Object:
        self._version += 1
        self.lease = copy.deepcopy(dict(written))
        self.lease["metadata"]["resourceVersion"] = str(self._version)
        return copy.deepcopy(self.lease)


class Client:
    def __init__(self, server: Server, identity: str) -> None:
        self._server = server
        self._identity = identity

    async def find(self, path: str) -> Object | None:
        found: Object | None = await self._server.call(self._identity, lambda: copy.deepcopy(self._server.lease))
        return found

    async def create(self, path: str, written: Object) -> Object:
        def act() -> Object:
            if self._server.lease is not None:
                raise ApiRefused(409, "AlreadyExists", "exists")
            return self._server.write(written)

        made: Object = await self._server.call(self._identity, act)
        return made

    async def replace(self, path: str, written: Object) -> Object:
        def act() -> Object:
            there = self._server.lease
            if there is None or there["metadata"]["resourceVersion"] != written["metadata"]["resourceVersion"]:
                raise ApiRefused(409, "Conflict", "changed")
            return self._server.write(written)

        replaced: Object = await self._server.call(self._identity, act)
        return replaced


def leadership(server: Server, identity: str) -> Leadership:
    clock = asyncio.get_running_loop().time
    return Leadership(server.of(identity), namespace="n", name="l", identity=identity, clock=clock, now=lambda: NOW)


@pytest.mark.looptime
async def test_another_takes_over_when_the_leader_falls_silent() -> None:
    server, clock = Server(), asyncio.get_running_loop().time
    one, two = leadership(server, "one"), leadership(server, "two")
    await one.acquire()
    keeping, waiting = asyncio.create_task(one.keep()), asyncio.create_task(two.acquire())
    await asyncio.sleep(60)
    assert not waiting.done()
    server.away.add("one")
    silent = clock()
    with pytest.raises(LeadershipLost, match="could not be renewed"):
        await keeping
    assert not waiting.done()
    assert not one.leads
    await waiting
    assert two.leads
    assert clock() - silent <= 30


@pytest.mark.looptime
async def test_a_leader_that_gives_up_is_followed_at_once() -> None:
    server, clock = Server(), asyncio.get_running_loop().time
    one, two = leadership(server, "one"), leadership(server, "two")
    await one.acquire()
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(10)
    await one.release()
    began = clock()
    await waiting
    assert clock() - began <= RETRY


@pytest.mark.looptime
async def test_a_leader_whose_lease_was_taken_does_not_fight_for_it() -> None:
    server = Server()
    one = leadership(server, "one")
    await one.acquire()
    assert server.lease is not None
    server.write(lease("two", server.lease["metadata"]["resourceVersion"]))
    with pytest.raises(LeadershipLost, match="taken by another"):
        await one.keep()
    assert server.lease["spec"]["holderIdentity"] == "two"


@pytest.mark.looptime
async def test_a_request_that_never_ends_does_not_keep_a_leader_in_office() -> None:
    delays = iter([0.0] * 4 + [1e6] * 100)
    server, clock = Server(lambda: next(delays)), asyncio.get_running_loop().time
    one = leadership(server, "one")
    await one.acquire()
    began = clock()
    with pytest.raises(LeadershipLost):
        await one.keep()
    assert clock() - began <= RENEW_WITHIN


async def never_two_at_once(seed: int, outages: list[tuple[int, float, float]]) -> None:
    """Three operators that are started anew when they end, while each loses the server now and then."""
    rng, clock = random.Random(seed), asyncio.get_running_loop().time
    server = Server(lambda: rng.choice([0.0, 0.01, 0.5, 3.0]))
    current: dict[str, Leadership] = {}

    async def live(identity: str) -> None:
        while True:
            current[identity] = leadership(server, identity)
            try:
                await current[identity].acquire()
                await current[identity].keep()
            except LeadershipLost:
                await asyncio.sleep(rng.uniform(0, 3))

    async def outage(number: int, start: float, length: float) -> None:
        identity = ("one", "two", "three")[number]
        await asyncio.sleep(start)
        server.away.add(identity)
        await asyncio.sleep(length)
        server.away.discard(identity)

    tasks = [asyncio.create_task(live(identity)) for identity in ("one", "two", "three")]
    tasks += [asyncio.create_task(outage(*each)) for each in outages]
    without = 0.0
    for _ in range(1200):
        await asyncio.sleep(0.25)
        leaders = [identity for identity, each in current.items() if each.leads]
        assert len(leaders) <= 1, f"{leaders} at {clock()}"
        without = 0.0 if leaders or server.away else without + 0.25
        assert without <= 60, "nobody leads although everybody can reach the server"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    outages=st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 200, allow_nan=False), st.floats(1, 60, allow_nan=False)), max_size=6
    ),
)
def test_there_are_never_two_leaders_and_soon_one(seed: int, outages: list[tuple[int, float, float]]) -> None:
    loop = looptime.new_event_loop(end=None)
    try:
        loop.run_until_complete(never_two_at_once(seed, outages))
    finally:
        loop.close()
