"""The sockets of a server: bound before anything slow, so that mistakes show at once; they listen once it is ready."""

from __future__ import annotations

import errno
import socket
from typing import Any

from resin.plan import InvalidRequest

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class Listener:
    """One bound socket for each address of a host, all on one port. A context manager that closes them.

    Attributes:
        sockets: what to listen on.
        port: the port, chosen by the system if 0 was asked for.
    """

    def __init__(self, host: str, port: int) -> None:
        """Raises InvalidRequest naming host or port."""
        self.sockets: list[socket.socket] = []
        self.port = port
        try:
            for family, address in _addresses(host, port):
                self._bind(family, address, host)
            if not self.sockets:
                raise InvalidRequest("host", host, "an address of this machine")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the port; safe to call twice."""
        for bound in self.sockets:
            bound.close()

    def _bind(self, family: int, address: Any, host: str) -> None:
        try:
            created = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # the family is switched off
            return
        self.sockets.append(created)
        created.setblocking(False)
        # A server that was stopped a moment ago must not keep the port from the next one.
        created.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            created.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            created.bind((address[0], self.port, *address[2:]))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InvalidRequest("port", self.port, f"a port that is free on {host}") from error
            if error.errno in (errno.EACCES, errno.EPERM):
                raise InvalidRequest("port", self.port, "a port that this user may take, such as 8000") from error
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            self.sockets.remove(created)
            created.close()
            return
        self.port = created.getsockname()[1]


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest("host", host, f"an address or name of this machine ({error})") from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found if family in _FAMILIES))
