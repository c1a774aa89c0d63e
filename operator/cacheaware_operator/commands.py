"""Command lines and environments of the parts of one replica. Pure; the flags are those of design page 0001."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cacheaware_operator.plan import EnginePlan
from cacheaware_operator.ports import LOOPBACK
from cacheaware_operator.vllm_flags import vllm_flags


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where the parts of one replica are, on this machine or in their pod."""

    name: str
    port: int  # OpenAI side of the sidecar: the one that users see
    control_port: int
    engine_port: int
    kv_socket: Path
    view_file: Path
    secrets_dir: Path
    host: str = LOOPBACK  # what the sidecar listens on; a pod's is reached from outside

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def control_url(self) -> str:
        return f"http://{LOOPBACK}:{self.control_port}"

    @property
    def engine_url(self) -> str:
        return f"http://{LOOPBACK}:{self.engine_port}"


def engine_arguments(engine: EnginePlan, place: ReplicaPlace, threads: int | None = None) -> tuple[str, ...]:
    """Flags of `python -m cacheaware_engine`. `threads` counts unless the pool's own args say otherwise."""
    arguments = [
        f"--model={engine.model}",
        f"--served-model-name={engine.served_model_name}",
        f"--host={LOOPBACK}",
        f"--port={place.engine_port}",
        f"--kv-socket={place.kv_socket}",
        f"--kv-cache-dtype={engine.kv_cache_dtype.lower()}",
    ]
    if engine.block_size is not None:
        arguments.append(f"--block-size={engine.block_size}")
    if engine.kv_cache_memory is not None:
        arguments.append(f"--kv-cache-memory={engine.kv_cache_memory}")
    if engine.max_model_len is not None:
        arguments.append(f"--max-model-len={engine.max_model_len}")
    if threads is not None:
        arguments.append(f"--threads={threads}")
    return (*arguments, *engine.arguments)  # theirs last: of a flag given twice the last one counts


def vllm_arguments(engine: EnginePlan, place: ReplicaPlace, python: str) -> tuple[str, ...]:
    """Flags of `python -m cacheaware_engine.vllm_plugin.launch`: the Python that has vLLM, and what it starts with."""
    return (f"--python={python}", f"--kv-socket={place.kv_socket}", "--", *vllm_flags(engine, place.engine_port))


def engine_environment(engine: EnginePlan, inherited: Mapping[str, str]) -> dict[str, str]:
    return {**inherited, **engine.environment}


def sidecar_arguments(place: ReplicaPlace, *, estimate_only: bool = False) -> tuple[str, ...]:
    """Flags of `python -m cacheaware_sidecar`. `estimate_only`: the engine keeps no account of tiers."""
    return (
        f"--host={place.host}",
        f"--port={place.port}",
        f"--control-host={place.host}",
        f"--control-port={place.control_port}",
        f"--engine-url={place.engine_url}",
        "--estimate-only" if estimate_only else f"--kv-socket={place.kv_socket}",
        f"--view-file={place.view_file}",
        f"--secrets-dir={place.secrets_dir}",
    )


def threads_per_engine(cores: int, replicas: int) -> int | None:
    """One engine takes what it finds; several share the cores evenly, at least one each."""
    return None if replicas <= 1 else max(1, cores // replicas)
