"""Log lines for people (`console`) or machines (`json`): a message and named values, never a prompt and never a key."""

from __future__ import annotations

import datetime
import json
import logging
import sys
import time
from typing import Any

from cacheaware_sidecar.log_handler import BackgroundHandler
from cacheaware_sidecar.settings import LogFormat, LogLevel

ROOT = "cacheaware_sidecar"


def configure(level: LogLevel, log_format: LogFormat) -> BackgroundHandler:
    """Send this package's log to stderr; libraries say only what is wrong. Gives the handler, which counts what it
    could not write.
    """
    handler = BackgroundHandler(sys.stderr.fileno())
    handler.setFormatter(JsonLines() if log_format == "json" else ConsoleLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(ROOT).setLevel(level.upper())
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a line that cannot be written is lost, and nothing else happens
    # No line says which thread, process or source line wrote it, and finding out costs more than the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # documented in logging's own how-to, under "Optimization"
    return handler


def values(**named: Any) -> dict[str, Any]:
    """`log.info("…", extra=values(tier="gold"))`; what is None is left out."""
    return {"values": {name: value for name, value in named.items() if value is not None}}


class ConsoleLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__()
        self._second, self._clock = 0, ""  # the text of the last second: most lines share it

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._clock = second, time.strftime("%H:%M:%S", time.localtime(second))
        named = "".join([f" {name}={_plain(value)}" for name, value in getattr(record, "values", {}).items()])
        milliseconds = int(record.created * 1000) % 1000
        line = f"{self._clock}.{milliseconds:03} {record.levelname.lower():7} {record.getMessage()}{named}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _plain(value: Any) -> str:
    if type(value) is float:
        return f"{value:.1f}"
    text = str(value)
    return text if text and text.isprintable() and " " not in text else json.dumps(text)
