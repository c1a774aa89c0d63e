"""A whole cluster with one real node, made of this machine's own parts: control plane, namespaces, images, node."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from e2e import images, namespaces, node
from e2e.cluster import Cluster, Object
from e2e.control_plane import Access, ControlPlane, StartFailed, find_programs
from e2e.images import Images
from e2e.namespaces import Machine, Network
from e2e.node import NODE, Node


class NodeCluster(Cluster):
    """A cluster whose pods run."""

    def __init__(self, access: Access, machine: Machine, node: Node, images: Images, folder: Path) -> None:
        super().__init__(access)
        self.images = images
        self.folder = folder  # what is in it can be mounted into pods by its path
        self._machine = machine
        self._node = node

    @property
    def network(self) -> Network:
        return self._machine.network

    def kill_container(self, namespace: str, pod: str, container: str) -> None:
        """Kill the first process of a container, and wait until the kubelet has seen it."""
        before = self.container(namespace, pod, container)
        self._node.kill(before["containerID"])
        self.wait_for(
            f"the kubelet restarts {container} of {pod}",
            lambda: self.container(namespace, pod, container)["restartCount"] > before["restartCount"],
        )

    def container(self, namespace: str, pod: str, name: str) -> Object:
        """What the kubelet says of a container."""
        status = self.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")["status"]
        all_of_them = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
        found: Object = next(each for each in all_of_them if each["name"] == name)
        return found

    def complaints(self) -> str:
        return self._node.complaints()


@contextlib.contextmanager
def node_cluster() -> Iterator[NodeCluster]:
    """Raises `Unavailable` where there cannot be one."""
    programs = find_programs(os.environ)
    namespaces.check()
    node.check(programs)
    images.check()
    built = images.project_images()
    # Not a folder of pytest, which keeps those of the last runs; and where files of the store can be shared.
    cache = images.cache_folder()
    for old in cache.glob("node-*-*"):
        if not Path(f"/proc/{old.name.split('-')[1]}").exists():  # its run was killed
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"node-{os.getpid()}-", dir=cache))
    try:
        with contextlib.ExitStack() as stack:
            machine = stack.enter_context(Machine(folder))
            control_plane = ControlPlane(
                programs,
                folder,
                address=machine.network.outside,
                services=machine.network.services,
                users=node.USERS,
            )
            access = stack.enter_context(control_plane)
            kubeconfigs = {user: control_plane.kubeconfig_of(user) for user in node.USERS}
            running = stack.enter_context(Node(programs, folder, machine, kubeconfigs, built))
            cluster = NodeCluster(access, machine, running, built, folder)
            stack.callback(cluster.close)
            _wait_for_the_node(cluster)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_the_node(cluster: NodeCluster) -> None:
    def ready() -> bool:
        answer = cluster.request("GET", f"/api/v1/nodes/{NODE}")
        conditions = answer.body["status"].get("conditions", ()) if answer.ok else ()
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    try:
        cluster.wait_for("the node is Ready", ready, timeout=60)
    except AssertionError as error:
        raise StartFailed(f"{error}\n{cluster.complaints()}") from None
