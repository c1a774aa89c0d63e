"""Where the servers listen: a TCP port for the OpenAI side, a Unix socket for the KV side.

What cannot be bound is refused with the flag at fault. The socket is made for its owner only, and a leftover of a
process that is gone is replaced; one that answers is not.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from aiohttp import web

KEEP_ALIVE_S = 120.0  # longer than any client of ours keeps an idle connection, so that none finds it closed
SHUTDOWN_S = 1.0  # for handlers that are still writing when the servers close


class CannotListen(Exception):
    """An address or a socket path cannot be used; the message names the flag."""


@asynccontextmanager
async def serving(
    openai: web.Application, kv: web.Application, host: str, port: int, kv_socket: Path
) -> AsyncIterator[int]:
    """Both servers, running; yields the port that was bound."""
    with _tcp_socket(host, port) as tcp, _unix_socket(kv_socket) as unix:
        async with _running(openai, tcp), _running(kv, unix):
            yield tcp.getsockname()[1]


@asynccontextmanager
async def _running(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    # handler_cancellation: a client that goes away cancels its handler, which aborts its requests.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


@contextmanager
def _tcp_socket(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise CannotListen(
                f"argument --port: {host}:{port} cannot be used ({os.strerror(error.errno or 0)}): "
                "stop what listens there, or choose another port"
            ) from error
        listener.setblocking(False)
        yield listener


@contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    _remove_leftover(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        mask = os.umask(0o177)  # the socket is its owner's from the moment it exists
        try:
            listener.bind(os.fspath(path))
        except OSError as error:
            raise CannotListen(
                f"argument --kv-socket: {path} cannot be used ({os.strerror(error.errno or 0)}): choose another path"
            ) from error
        finally:
            os.umask(mask)
        made = path.lstat().st_ino
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_ino == made:
                    path.unlink()


def _remove_leftover(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise CannotListen(f"argument --kv-socket: {path} exists and is not a socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)  # nobody answers: left by a process that was killed
        else:
            raise CannotListen(
                f"argument --kv-socket: another process listens on {path}: stop it or choose another path"
            )
