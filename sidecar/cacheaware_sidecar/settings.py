"""The sidecar's settings: flags parsed once into one frozen dataclass. It reads no environment variables.

A missing, unknown or malformed flag ends the process with code 2 and one line that names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NoReturn
from urllib.parse import urlsplit

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")
LOG_FORMATS: tuple[LogFormat, ...] = ("console", "json")
_LONGEST_UNIX_PATH = 107  # bytes; the kernel refuses longer ones with a message that names no path


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Times are seconds. See `--help` for what each one means."""

    engine_url: str
    kv_socket: Path | None  # absent (--estimate-only): the engine keeps no account of blocks
    view_file: Path
    secrets_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    control_host: str = "127.0.0.1"
    control_port: int = 9400
    max_body_bytes: int = 8 * 1024 * 1024  # a 1M-token prompt is about 4 MB of text
    max_queue: int = 1024
    request_timeout: float = 600.0
    connect_timeout: float = 5.0
    first_byte_timeout: float = 120.0
    idle_timeout: float = 60.0
    engine_slots: int | None = None  # absent: what the ledger says
    group_hints: bool = False  # why not: docs/designs/0003-scheduling.md
    drain_timeout: float = 30.0
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"
    no_accounts: str | None = None  # no flag: what an engine said that was asked for accounts and has none


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"cacheaware-sidecar: {message}\n")


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from the command line; ends the process with code 2 on a bad one."""
    parser = _build()
    values = vars(parser.parse_args(arguments))
    values["kv_socket"] = None if values.pop("estimate_only") else values["kv_socket"]
    settings = Settings(**values)
    if settings.group_hints and settings.kv_socket is None:
        parser.error("argument --group-hints: it is the engine's /kv/* that takes them; give --kv-socket")
    if settings.port and settings.port == settings.control_port and settings.host == settings.control_host:
        parser.error(f"argument --control-port: {settings.port} is --port already; choose another")
    return settings


def _build() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cacheaware-sidecar",
        description="OpenAI-compatible front of one engine: tiers, isolation and the order of requests.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}

    def add(flag: str, kind: Callable[[str], object], text: str, required: bool = False) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        if required:
            parser.add_argument(flag, type=kind, required=True, help=text, default=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, type=kind, default=defaults[name], help=text)

    add("--engine-url", _url, "OpenAI side of the engine, e.g. http://127.0.0.1:8001", required=True)
    account = parser.add_mutually_exclusive_group(required=True)
    account.add_argument(
        "--kv-socket", type=_socket_path, help="Unix socket of the engine's /kv/*", default=argparse.SUPPRESS
    )
    account.add_argument(
        "--estimate-only",
        action="store_true",
        help="the engine has no /kv/* (an unmodified vLLM): quotas only bound what is admitted, by estimate",
    )
    add("--view-file", Path, "the wanted view as JSON; read again when it changes, a newer number wins", required=True)
    add(
        "--secrets-dir",
        Path,
        "folder with salt-key, control-token and api-keys.json; read again when they change",
        required=True,
    )
    add("--host", str, "address of the OpenAI side")
    add("--port", _port, "port of the OpenAI side; 0 lets the system choose")
    add("--control-host", str, "address of the control side")
    add("--control-port", _port, "port of the control side; 0 lets the system choose")
    add("--max-body-bytes", _positive_int, "a larger body is answered with 413")
    add("--max-queue", _positive_int, "most requests that wait here; beyond it 429")
    add("--request-timeout", _seconds, "seconds a request may take that does not stream, or may wait for its turn")
    add("--connect-timeout", _seconds, "seconds to connect to the engine")
    add("--first-byte-timeout", _seconds, "seconds from forwarding a streaming request to its first byte")
    add(
        "--idle-timeout",
        _seconds,
        "seconds between two bytes of a stream, or of a request that arrives; a stream has no total limit",
    )
    add(
        "--engine-slots",
        _positive_int,
        "most sequences inside the engine at once; absent: what its ledger says, 256 with --estimate-only",
    )
    parser.add_argument(
        "--group-hints",
        action="store_true",
        help="tell the engine which groups will grow, so that it sets free blocks aside for them",
    )
    add("--drain-timeout", _seconds, "seconds that running requests get after SIGTERM")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default=defaults["log_level"], help="least level logged")
    parser.add_argument("--log-format", choices=LOG_FORMATS, default=defaults["log_format"], help="form of a log line")
    return parser


def _port(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: expected 0 to 65535")
    return value


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 2**40:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 7 * 86400:  # also refuses nan
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and at most a week")
    return value


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or "@" in parts.netloc:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL like http://127.0.0.1:8001")
    return text.rstrip("/")


def _socket_path(text: str) -> Path:
    if len(text.encode()) > _LONGEST_UNIX_PATH:
        raise argparse.ArgumentTypeError(
            f"{text!r} is longer than the {_LONGEST_UNIX_PATH} bytes a socket path may have"
        )
    return Path(text)
