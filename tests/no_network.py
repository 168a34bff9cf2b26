"""Forbids the network: whatever leaves this machine by a socket raises, loopback and Unix sockets don't.

Imported as ``sitecustomize`` it does so for a whole process; :func:`forbidden` for a block.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_forbidden = False
_installed = False


class NetworkForbidden(BaseException):
    """Something wanted to reach the network; no ``except Exception`` hides it."""


def is_local(host: object) -> bool:
    """Return whether a host is this machine, without asking anybody."""
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(str(name).partition("%")[0])
    except ValueError:
        return False  # a name that would have to be looked up
    return address.is_loopback or address.is_unspecified


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _forbidden or not event.startswith("socket."):
        return
    host: object = None
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # Unix sockets have a path
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    elif event == "socket.getnameinfo":
        host = arguments[0][0]
    if not is_local(host):
        raise NetworkForbidden(f"{event} to {host!r}: fedaudit and its tests need no network")


def forbid() -> None:
    """Forbid the network to this process, from now on."""
    global _forbidden, _installed
    if not _installed:
        sys.addaudithook(_hook)  # no hook can be taken away
        _installed = True
    _forbidden = True


@contextmanager
def forbidden() -> Iterator[None]:
    """Forbid the network while the block runs."""
    global _forbidden
    before = _forbidden
    forbid()
    try:
        yield
    finally:
        _forbidden = before


if __name__ == "sitecustomize":
    forbid()
