"""Which TCP ports the parts of a local pool listen on.

Ports that users see are asked for (`--port`, one more per replica) and must be free; the inner ones are whatever the
system has.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from cacheaware_operator.errors import PortInUse

LOOPBACK = "127.0.0.1"
HIGHEST_PORT = 65535


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """`count` different ports that nobody listens on now. All are held until the last is chosen, so none repeats."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def require_free(ports: Sequence[int], first: int, flag: str = "--port", host: str = LOOPBACK) -> None:
    """Raise `PortInUse` for the first port that somebody listens on, saying which flag to change."""
    for port in ports:
        if port > HIGHEST_PORT:
            raise PortInUse(host, port, f"there are {HIGHEST_PORT} ports; choose a lower {flag} than {first}")
        if _taken(host, port):
            raise PortInUse(host, port, f"stop what listens there, or choose another with {flag}{_span(first, port)}")


def _span(first: int, port: int) -> str:
    return "" if port == first else f" (now {first}, and one more for each further replica)"


def _taken(host: str, port: int) -> bool:
    """Raises OSError where the port cannot be had for another reason, such as a privileged one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a listener
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"port {port} on {host} cannot be used: {error.strerror}") from None
            return True
    return False
