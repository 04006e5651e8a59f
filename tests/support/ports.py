"""Ports for what must come back on the same one."""

from __future__ import annotations

import contextlib
import random
import socket

# Below what Linux gives to who asks for any port, so that nobody is given one of ours in the meantime.
_CHOICE = range(10_240, 32_768)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that were free a moment ago."""
    chance = random.SystemRandom()
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            port = chance.choice(_CHOICE)
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
        return ports


# Flags of `picker serve`: each of its ports is one that is free.
ANY_PORTS = [
    word
    for port in ("--extproc-port", "--extproc-health-port", "--admin-port", "--admin-grpc-port")
    for word in (port, "0")
]
