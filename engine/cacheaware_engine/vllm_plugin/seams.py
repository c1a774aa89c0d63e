"""The places of vLLM that the plugin stands on, and the check that a vLLM has them as expected.

The check reads vLLM's sources, it does not import them: so it says the same of an installed vLLM, before any of it is
loaded, and of a release that is only unpacked. A place is a class with methods whose leading parameters are named here;
more parameters with defaults are fine. Names that are read inside methods are looked for as attributes of the class.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SUPPORTED: Mapping[str, str] = {
    "0.31": "read and checked seam by seam",
    "0.32": "read, checked seam by seam and run",
}
"""Minor versions that the plugin was written against, and how far each was tried."""


@dataclass(frozen=True, slots=True)
class Seam:
    """`methods`: leading parameters by method; `attributes`: what instances are given in `__init__` or as fields."""

    file: str
    name: str
    methods: Mapping[str, Sequence[str]]
    attributes: Sequence[str] = ()


SEAMS = (
    Seam(
        "v1/core/sched/async_scheduler.py",
        "AsyncScheduler",
        {"_update_request_with_output": ("self", "request", "new_token_ids")},
    ),
    Seam(
        "v1/core/sched/scheduler.py",
        "Scheduler",
        {
            "schedule": ("self",),
            "update_from_output": ("self", "scheduler_output", "model_runner_output"),
            "add_request": ("self", "request"),
            "finish_requests": ("self", "request_ids", "finished_status"),
            "reset_prefix_cache": ("self",),
            "_preempt_request": ("self", "request", "timestamp"),
            "_handle_blocked_waiting_request": ("self", "request"),
            "pause_state": ("self",),
        },
        (
            "vllm_config", "kv_cache_config", "kv_cache_manager", "requests", "running", "block_size", "max_model_len",
            "max_num_active_reqs",
        ),
    ),
    Seam(
        "v1/core/kv_cache_manager.py",
        "KVCacheManager",
        {
            "get_computed_blocks": ("self", "request"),
            "allocate_slots": ("self", "request", "num_new_tokens"),
            "free": ("self", "request"),
            "create_kv_cache_blocks": ("self", "blocks"),
        },
        ("block_pool", "watermark_blocks", "coordinator"),
    ),
    Seam(
        "v1/core/block_pool.py",
        "BlockPool",
        {
            "cache_full_blocks": (
                "self", "request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id",
            ),
            "touch": ("self", "blocks"),
            "free_blocks": ("self", "ordered_blocks"),
            "get_new_blocks": ("self", "num_blocks"),
        },
        ("blocks", "free_block_queue", "null_block"),
    ),
    Seam(
        "v1/core/kv_cache_utils.py",
        "FreeKVCacheBlockQueue",
        {
            "popleft": ("self",),
            "popleft_n": ("self", "n"),
            "remove": ("self", "block"),
            "append": ("self", "block"),
            "append_n": ("self", "blocks"),
            "prepend_n": ("self", "blocks"),
            "get_all_free_blocks": ("self",),
        },
        ("num_free_blocks",),
    ),
    Seam(
        "v1/request.py",
        "Request",
        {"is_finished": ("self",), "get_finished_reason": ("self",), "take_events": ("self",)},
        (
            "request_id", "client_index", "status", "sampling_params", "max_tokens", "num_prompt_tokens",
            "block_hashes", "num_output_placeholders", "num_stale_output_tokens", "drop_stale_output",
            "num_computed_tokens",
            "lora_request", "mm_features", "prompt_embeds", "skip_reading_prefix_cache", "resumable", "trace_headers",
        ),
    ),
)  # fmt: skip


def problems(version: str, package: Path) -> list[str]:
    """Why the vLLM whose package folder this is cannot carry the plugin; empty: it can."""
    minor = ".".join(version.split(".")[:2])
    if minor not in SUPPORTED:
        return [f"vLLM {version} is not supported: use one of {', '.join(f'{each}.x' for each in SUPPORTED)}"]
    return [f"vLLM {version}: {problem}" for seam in SEAMS for problem in missing(seam, package)]


def missing(seam: Seam, package: Path) -> list[str]:
    """What of one seam is not in these sources as expected."""
    try:
        tree = ast.parse((package / seam.file).read_text())
    except (OSError, SyntaxError) as error:
        return [f"{seam.file} cannot be read ({error})"]
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == seam.name), None)
    if found is None:
        return [f"{seam.file} has no class {seam.name}"]
    methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    absent = []
    for name, expected in seam.methods.items():
        method = methods.get(name)
        if method is None:
            absent.append(f"{seam.name} has no method {name}")
        elif (given := [argument.arg for argument in method.args.args])[: len(expected)] != list(expected):
            absent.append(f"{seam.name}.{name} takes {', '.join(given)}, not {', '.join(expected)} first")
        elif len(given) - len(method.args.defaults) > len(expected):
            absent.append(f"{seam.name}.{name} needs more than {', '.join(expected)}: {', '.join(given)}")
    known = _attributes(found)
    absent.extend(f"{seam.name} has no attribute {name}" for name in seam.attributes if name not in known)
    return absent


def _attributes(cls: ast.ClassDef) -> set[str]:
    """Fields of the class, and what its methods assign to `self`."""
    names = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return names
