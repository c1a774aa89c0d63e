"""Fixtures of the end-to-end tests. They skip, with the reason, where there is no cluster to test on.

The cluster is the first of these that there is: a control plane from the programs in KUBEBUILDER_ASSETS; the cluster of
KUBECONFIG (set it only for a cluster that may be tested on: the CRD is installed there, and stays); a control plane
from the programs that $CACHEAWARE_SHARED/kube unpacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from e2e.cluster import POOLS, Cluster, cluster_of_kubeconfig
from e2e.control_plane import ControlPlane, Unavailable, find_programs
from e2e.node_cluster import NodeCluster, node_cluster
from e2e.operators import RunningOperator, running_operator, settings_for
from e2e.serving import CONTEXT, ServingSpace, operator_overlay, serving_pool, serving_space
from e2e.space import Space
from e2e.stand_ins import StandInSidecars

# looptime asks for the current event loop before every test; asked before any was set, asyncio would make one that
# nobody closes.
asyncio.set_event_loop(None)

ROOT = Path(__file__).resolve().parents[1]
CRD_FILE = ROOT / "crds" / "cacheawarepools.yaml"

_CONTROL_PLANE = pytest.StashKey[ControlPlane]()
_NODES = pytest.StashKey[NodeCluster]()
OPERATOR_NAMESPACE = "cacheaware-system"


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster without nodes, one for the whole run; give each test its own `namespace`."""
    try:
        if "KUBECONFIG" in os.environ and "KUBEBUILDER_ASSETS" not in os.environ:
            with cluster_of_kubeconfig(Path(os.environ["KUBECONFIG"])) as access:
                found = Cluster(access)
                yield found
                found.close()
            return
        programs = find_programs(os.environ)
    except Unavailable as reason:
        pytest.skip(str(reason))
    control_plane = ControlPlane(programs, tmp_path_factory.mktemp("control-plane"))
    request.config.stash[_CONTROL_PLANE] = control_plane
    with control_plane as access:
        found = Cluster(access)
        yield found
        found.close()


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Cluster:
    """The cluster, with the CRD in it."""
    cluster.kubectl("apply", "-f", CRD_FILE)
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{POOLS}")
    path = "/apis/cacheaware.dev/v1alpha1/cacheawarepools"
    cluster.wait_for("the API of pools", lambda: cluster.request("GET", path).ok)
    return cluster


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder with the field's own tools: kstatus, flux-apply, prometheus, promtool."""
    shared = Path(os.environ.get("CACHEAWARE_SHARED") or ROOT.parent / "shared")
    unpack = shared / "tools" / "unpack"
    if not unpack.is_file():
        pytest.skip("set CACHEAWARE_SHARED to a folder with tools/unpack, which has kstatus, flux-apply and prometheus")
    return Path(subprocess.run([unpack], capture_output=True, text=True, check=True).stdout.strip())


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture
def space(installed: Cluster, namespace: str) -> Space:
    """The same, for pools."""
    return Space(installed, namespace)


@pytest.fixture
def sidecars() -> Iterator[StandInSidecars]:
    """What answers for the sidecars of pods."""
    with StandInSidecars().serving() as serving:
        yield serving


@pytest.fixture
def operator(space: Space, sidecars: StandInSidecars) -> Iterator[RunningOperator]:
    """An operator of the test's namespace."""
    with running_operator(space.cluster.kubeconfig, settings_for(space.name), sidecars.address_of) as running:
        yield running


# -- with a node -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def nodes(request: pytest.FixtureRequest) -> Iterator[NodeCluster]:
    """A cluster whose pods run, one for the whole run; the tiny model lies in its folder."""
    from cacheaware_engine.testing import save_tiny_model  # torch takes seconds, and only this rung needs it

    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(node_cluster())
        except Unavailable as reason:
            pytest.skip(str(reason))
        request.config.stash[_NODES] = found
        model = save_tiny_model(found.folder / "models" / "tiny", max_position_embeddings=CONTEXT)
        (model / "model.safetensors").chmod(0o644)  # containers run as another user
        yield found


@pytest.fixture(scope="session")
def installed_operator(nodes: NodeCluster) -> NodeCluster:
    """The operator, installed for the whole cluster as a user does it."""
    nodes.kubectl("apply", "--server-side", "-k", operator_overlay(nodes, "cluster-wide", OPERATOR_NAMESPACE))
    nodes.kubectl("wait", "--for=condition=Established", f"crd/{POOLS}")
    nodes.kubectl(
        *("rollout", "status", "deployment/cacheaware-operator", "--timeout=120s"),
        *("--namespace", OPERATOR_NAMESPACE),
        timeout=130,
    )
    return nodes


@pytest.fixture
def serving(installed_operator: NodeCluster) -> Iterator[ServingSpace]:
    """A restricted namespace of the test's own, with what pools need."""
    with serving_space(installed_operator) as space:
        yield space


@pytest.fixture(scope="session")
def chat(installed_operator: NodeCluster) -> Iterator[ServingSpace]:
    """One with the pool `chat`, two replicas that serve, for all tests that leave it as it was."""
    with serving_space(installed_operator) as space:
        space.apply(serving_pool())
        space.wait_ready()
        yield space


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure, tell what the clusters complained about."""
    report = yield
    if report.failed:
        if (control_plane := item.config.stash.get(_CONTROL_PLANE, None)) is not None:
            report.sections.append(("control plane", control_plane.complaints()))
        if (nodes := item.config.stash.get(_NODES, None)) is not None:
            report.sections.append(("node", nodes.complaints()))
    return report
