"""Log lines for people (`console`) or machines (`json`): a message and named values, never a request's text."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

from .settings import LogFormat, LogLevel

ROOT = "cacheaware_engine"


def configure(level: LogLevel, log_format: LogFormat) -> None:
    """Send the engine's log to stderr. Libraries say only what is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else ConsoleFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(ROOT).setLevel(level.upper())
    logging.captureWarnings(True)


def values(**named: Any) -> dict[str, Any]:
    """`log.info("request", extra=values(tier=…))`; what is None is left out."""
    return {"values": {name: value for name, value in named.items() if value is not None}}


class ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        named = "".join(f" {name}={_plain(value)}" for name, value in getattr(record, "values", {}).items())
        text = f"{time} {record.levelname.lower():7} {record.getMessage()}{named}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _plain(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)
