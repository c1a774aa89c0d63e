"""The loop over all pools: what wakes one, what is read before the first look, what lists catch, what a fault costs."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cacheaware_api import crdgen
from cacheaware_operator.cluster.objects import OptionalKind
from cacheaware_operator.cluster_store import PoolKey
from cacheaware_operator.errors import ApiUnreachable
from cacheaware_operator.kinds import CONFIG_MAP, DEPLOYMENT, OPTIONAL, POD, POOL, SECRET, Kind
from cacheaware_operator.kubernetes_fleet import Cluster
from cacheaware_operator.metrics import Metrics
from cacheaware_operator.pool_loop import PACE, Pace, PoolLoop
from cacheaware_operator.pool_pass import PoolPass
from cacheaware_operator.schema_check import openapi_path
from cacheaware_operator.testing_cluster import FakeCluster, pod_of

QUICK = Pace(lists=0.1, crd=0.01, schema=0.1)
SCHEMA = crdgen.schema()


class Looks(PoolPass):
    """Counts looks at pools instead of acting; `faults` has what a look at a pool raises, one after the other."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, Metrics(), lambda: pytest.fail("nothing is written here"))
        self.done: list[str] = []
        self.faults: dict[str, list[Exception]] = {}
        self._news = asyncio.Event()

    async def run(self, key: PoolKey) -> float | None:
        self.done.append(key.name)
        self._news.set()
        if faults := self.faults.get(key.name):
            raise faults.pop(0)
        return None

    async def wait_for(self, name: str, count: int) -> None:
        async with asyncio.timeout(60):
            while self.done.count(name) < count:
                self._news.clear()
                await self._news.wait()


class Bench:
    def __init__(self, there: FakeCluster) -> None:
        self.there = there
        there.documents[openapi_path()] = document()
        self.cluster = there.cluster()
        self.look = Looks(self.cluster)
        self.metrics = Metrics()
        self.loop = self.over()

    def over(self, *namespaces: str, pace: Pace = PACE) -> PoolLoop:
        clock = asyncio.get_running_loop().time
        return PoolLoop(self.cluster, self.look, self.metrics, namespaces, clock, pace)

    def put_pool(self, name: str = "chat", namespace: str = "default", **spec: Any) -> dict[str, Any]:
        return self.there.put(POOL, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})

    def tell(self, kind: Kind, written: dict[str, Any], *, gone: bool = False) -> None:
        """As a watch does."""
        self.loop.saw(kind, copy.deepcopy(written), gone=gone)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Looks]:
        await self.loop.prepare()
        task = asyncio.create_task(self.loop.run())
        try:
            yield self.look
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def document(change: Callable[[dict[str, Any]], None] = lambda schema: None) -> dict[str, Any]:
    schema = copy.deepcopy(SCHEMA)
    change(schema)
    kinds = [{"group": POOL.group, "version": POOL.version, "kind": POOL.kind}]
    return {"components": {"schemas": {"pool": schema | {"x-kubernetes-group-version-kind": kinds}}}}


def without_tiers(schema: dict[str, Any]) -> None:
    del schema["properties"]["spec"]["properties"]["tiers"]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with FakeCluster() as there:
        yield Bench(there)


# -- before the first look --------------------------------------------------------------------------------------------


async def test_everything_is_read_before_the_first_look(bench: Bench) -> None:
    bench.put_pool()
    bench.there.put(POD, pod_of("chat", "chat-0"))
    await bench.loop.prepare()
    assert bench.look.done == []
    assert bench.cluster.store.get(POOL, "default", "chat") is not None
    assert bench.cluster.store.get(POD, "default", "chat-0") is not None


async def test_every_pool_that_is_there_is_looked_at(bench: Bench) -> None:
    for name in ("chat", "code"):
        bench.put_pool(name)
    async with bench.running() as look:
        await look.wait_for("chat", 1)
        await look.wait_for("code", 1)


async def test_a_crd_that_is_not_installed_yet_is_waited_for(bench: Bench) -> None:
    bench.loop = bench.over(pace=QUICK)
    del bench.there.documents[openapi_path()]
    preparing = asyncio.create_task(bench.loop.prepare())
    await bench.there.is_read(openapi_path(), 3)
    assert not preparing.done()
    bench.there.documents[openapi_path()] = document()
    async with asyncio.timeout(60):
        await preparing
    assert bench.look.schema_problem is None


async def test_an_outdated_schema_is_known_before_the_first_look(bench: Bench) -> None:
    bench.there.documents[openapi_path()] = document(
        lambda schema: schema["properties"]["spec"]["properties"].pop("tiers")
    )
    await bench.loop.prepare()
    assert "spec.tiers" in (bench.look.schema_problem or "")


@pytest.mark.parametrize(
    "installed", [frozenset[OptionalKind](), frozenset({OptionalKind.POD_MONITOR}), frozenset(OptionalKind)]
)
async def test_only_optional_kinds_that_are_there_are_built_and_watched(
    bench: Bench, installed: frozenset[OptionalKind]
) -> None:
    resources = [{"name": OPTIONAL[kind].plural} for kind in installed] + [{"name": "alertmanagers"}]
    if installed:
        bench.there.documents["/apis/monitoring.coreos.com/v1"] = {"resources": resources}
    await bench.loop.prepare()
    assert bench.look.discovered.kinds == installed
    assert {kind for kind in bench.loop.kinds if kind in OPTIONAL.values()} == {OPTIONAL[kind] for kind in installed}


async def test_an_operator_of_some_namespaces_reads_those_only(bench: Bench) -> None:
    bench.loop = bench.over("one", "two")
    for namespace in ("one", "two", "three"):
        bench.put_pool(namespace, namespace)
    await bench.loop.prepare()
    found = {pool["metadata"]["name"] for pool in bench.cluster.store.all(POOL)}
    assert found == {"one", "two"}
    assert POOL.path(None) not in bench.there.reads


async def test_a_server_that_does_not_answer_is_an_error_of_the_start(bench: Bench) -> None:
    bench.there.broken = True
    with pytest.raises(ApiUnreachable):
        await bench.loop.prepare()


# -- what wakes a pool ------------------------------------------------------------------------------------------------


async def test_a_change_of_a_pool_or_of_what_is_labelled_as_its_own_wakes_it(bench: Bench) -> None:
    async with bench.running() as look:
        bench.tell(POOL, bench.put_pool())
        await look.wait_for("chat", 1)
        bench.tell(POD, bench.there.put(POD, pod_of("chat", "chat-0")))
        await look.wait_for("chat", 2)
        bench.tell(POD, bench.there.put(POD, pod_of("chat", "chat-0", ready=False)))
        await look.wait_for("chat", 3)


async def test_changes_that_come_together_are_one_look(bench: Bench) -> None:
    bench.put_pool()
    async with bench.running() as look:
        await look.wait_for("chat", 1)
        for number in range(50):
            bench.tell(POD, bench.there.put(POD, pod_of("chat", f"chat-{number}")))
        await look.wait_for("chat", 2)
        bench.tell(POOL, bench.put_pool("sentinel"))
        await look.wait_for("sentinel", 1)
        assert look.done.count("chat") == 2


async def test_what_is_told_twice_or_late_wakes_nobody(bench: Bench) -> None:
    pool = bench.put_pool()
    async with bench.running() as look:
        await look.wait_for("chat", 1)
        bench.tell(POOL, pool)
        bench.tell(POOL, {**pool, "metadata": {**pool["metadata"], "resourceVersion": "1"}})
        bench.tell(POOL, bench.put_pool("sentinel"))
        await look.wait_for("sentinel", 1)
        assert look.done.count("chat") == 1


async def test_what_belongs_to_no_pool_wakes_nobody_and_is_not_kept(bench: Bench) -> None:
    secret = bench.there.put(SECRET, {"metadata": {"name": "of-somebody", "namespace": "default"}, "data": {}})
    async with bench.running() as look:
        bench.tell(SECRET, secret)
        bench.tell(POOL, bench.put_pool("sentinel"))
        await look.wait_for("sentinel", 1)
        assert look.done == ["sentinel"]
    assert bench.cluster.store.get(SECRET, "default", "of-somebody") is None


# -- what pools refer to ----------------------------------------------------------------------------------------------


def with_keys(name: str) -> dict[str, Any]:
    return {"identity": {"type": "APIKeys", "apiKeys": {"secretRef": {"name": name}}}}


async def test_a_secret_wakes_every_pool_that_refers_to_it_and_no_other(bench: Bench) -> None:
    bench.put_pool("chat", **with_keys("keys"))
    bench.put_pool("code", **with_keys("keys"))
    bench.put_pool("other", **with_keys("other-keys"))
    secret = bench.there.put(SECRET, {"metadata": {"name": "keys", "namespace": "default"}, "data": {}})
    async with bench.running() as look:
        for name in ("chat", "code", "other"):
            await look.wait_for(name, 1)
        bench.tell(SECRET, secret)
        await look.wait_for("chat", 2)
        await look.wait_for("code", 2)
        bench.tell(SECRET, secret, gone=True)
        await look.wait_for("chat", 3)
        assert look.done.count("other") == 1


async def test_a_secret_that_no_pool_refers_to_any_more_is_forgotten(bench: Bench) -> None:
    secret = bench.there.put(SECRET, {"metadata": {"name": "keys", "namespace": "default"}, "data": {}})
    async with bench.running() as look:
        bench.tell(POOL, bench.put_pool("chat", **with_keys("keys")))
        bench.tell(SECRET, secret)
        await look.wait_for("chat", 1)
        assert bench.cluster.store.get(SECRET, "default", "keys") is not None
        bench.tell(POOL, bench.put_pool("chat", **with_keys("new-keys")))
        assert bench.cluster.store.get(SECRET, "default", "keys") is None


async def test_a_config_map_of_another_namespace_wakes_nobody(bench: Bench) -> None:
    reference = {"name": "prompts", "key": "a"}
    bench.put_pool("chat", publicPrefixes=[{"name": "assistant", "configMapKeyRef": reference}])
    elsewhere = bench.there.put(CONFIG_MAP, {"metadata": {"name": "prompts", "namespace": "elsewhere"}, "data": {}})
    async with bench.running() as look:
        await look.wait_for("chat", 1)
        bench.tell(CONFIG_MAP, elsewhere)
        bench.tell(POOL, bench.put_pool("sentinel"))
        await look.wait_for("sentinel", 1)
        assert look.done.count("chat") == 1


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(ApiUnreachable("away"), id="the API server is away"),
        pytest.param(ZeroDivisionError("a bug"), id="a fault of ours"),
    ],
)
async def test_what_goes_wrong_with_one_pool_is_tried_again_and_holds_up_no_other(
    bench: Bench, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bench.look.faults["chat"] = [fault]
    bench.put_pool()
    bench.put_pool("code")
    async with bench.running() as look:
        await look.wait_for("code", 1)
        await look.wait_for("chat", 2)
    assert "pool default/chat" in caplog.text
    assert str(fault) in caplog.text


# -- what watches missed ----------------------------------------------------------------------------------------------


async def test_a_list_wakes_the_pools_of_which_it_has_news(bench: Bench) -> None:
    bench.loop = bench.over(pace=QUICK)
    bench.put_pool()
    bench.put_pool("code", **with_keys("keys"))
    bench.there.put(POD, pod_of("chat", "chat-0"))
    async with bench.running() as look:
        await look.wait_for("chat", 1)
        await look.wait_for("code", 1)
        bench.there.remove(POD, "chat-0")
        await look.wait_for("chat", 2)
        bench.there.put(
            DEPLOYMENT, {"metadata": {"name": "x", "labels": {"cacheaware.dev/pool": "code"}, "namespace": "default"}}
        )
        await look.wait_for("code", 2)
        assert look.done.count("chat") == 2


async def test_a_list_that_fails_is_tried_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.loop = bench.over(pace=QUICK)
    async with bench.running() as look:
        bench.there.broken = True
        await bench.there.is_read(POOL.path(None), bench.there.reads.count(POOL.path(None)) + 3)  # aiohttp asks twice
        assert "could not list everything" in caplog.text
        bench.there.broken = False
        bench.put_pool()
        await look.wait_for("chat", 1)


async def test_a_schema_that_is_put_right_wakes_every_pool(bench: Bench) -> None:
    bench.loop = bench.over(pace=QUICK)
    bench.put_pool()
    bench.there.documents[openapi_path()] = document(
        lambda schema: schema["properties"]["spec"]["properties"].pop("tiers")
    )
    async with bench.running() as look:
        await look.wait_for("chat", 1)
        bench.there.documents[openapi_path()] = document()
        await look.wait_for("chat", 2)
        assert look.schema_problem is None
