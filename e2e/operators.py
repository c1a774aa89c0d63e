"""An operator inside the test's process, in a thread with a loop of its own; the real one but for `address_of`."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cacheaware_operator.kubernetes_credentials import Credentials
from cacheaware_operator.operator_process import OperatorProcess
from cacheaware_operator.settings import Settings
from cacheaware_operator.sidecars import AddressOf

SETTINGS = Settings(
    engine_image="example.com/engine:1",
    sidecar_image="example.com/sidecar:1",
    identity="one",
    lease_namespace="default",
    metrics_host="127.0.0.1",
    metrics_port=0,
)


def settings_for(namespace: str, identity: str = "one") -> Settings:
    return dataclasses.replace(SETTINGS, namespaces=(namespace,), lease_namespace=namespace, identity=identity)


@dataclasses.dataclass
class RunningOperator:
    process: OperatorProcess
    stop: threading.Event  # ends it as SIGTERM would
    ended: threading.Event
    code: int | None = None

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.process.port}"


@contextmanager
def running_operator(kubeconfig: Path, settings: Settings, address_of: AddressOf) -> Iterator[RunningOperator]:
    """Stopped, and waited for, at the end. What it raises is raised here."""
    process = OperatorProcess(settings, Credentials.load(kubeconfig), address_of=address_of)
    running = RunningOperator(process, threading.Event(), threading.Event())
    faults: list[BaseException] = []

    async def run() -> None:
        stop = asyncio.Event()
        watch = asyncio.create_task(asyncio.to_thread(running.stop.wait))
        watch.add_done_callback(lambda _: stop.set())
        try:
            running.code = await process.run(stop)
        finally:
            running.stop.set()
            await watch

    def body() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # the thread's outermost frame: handed to the test
            faults.append(error)
        finally:
            running.ended.set()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield running
    finally:
        running.stop.set()
        thread.join(60)
        assert not thread.is_alive(), "the operator did not end within 60 s"
        if faults:
            raise faults[0]
