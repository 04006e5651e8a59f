"""gRPC messages in the bytes of a stream: a flag, four bytes of length, the message. No IO.

Source: the gRPC over HTTP/2 protocol, "Length-Prefixed-Message".
"""

from __future__ import annotations

from picker.rpc.budget import ByteBudget

# A call may hold so much whatever others hold: the pieces of a body that a gateway passes through are not longer, and
# must not stop in the middle because of what others send.
SPARE_BYTES = 64 * 1024

_PREFIX = 5


class BadFraming(Exception):
    """The bytes are no message that can be taken."""


class CompressedMessage(BadFraming):
    """Nobody was told that compression is understood here."""


class MessageTooLarge(BadFraming):
    """Longer than the limit."""


class NoRoom(BadFraming):
    """Too much is held already of messages that have not come whole."""


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


class MessageReader:
    """Puts one call's messages together, each of at most `limit` bytes, from pieces cut anywhere. Of a message that has
    not come whole, what is more than `SPARE_BYTES` is held at the budget's expense.
    """

    __slots__ = ("_budget", "_held", "_limit", "_over", "_reserved")

    def __init__(self, limit: int, budget: ByteBudget) -> None:
        self._limit = limit
        self._budget = budget
        self._held = bytearray()
        self._reserved = 0
        self._over = False

    def read(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes. Raises `BadFraming`, and reads nothing after that."""
        if self._over:
            return []
        try:
            if not self._held and len(data) >= _PREFIX and self._length(data) == len(data) - _PREFIX:
                return [data[_PREFIX:]]
            return self._cut(data)
        except BadFraming:
            self.close()
            raise

    def close(self) -> None:
        """Let go of what is held. Harmless when repeated."""
        self._over = True
        self._held = bytearray()
        self._reserve(0)

    def _cut(self, data: bytes) -> list[bytes]:
        held = self._held
        self._reserve(len(held) + len(data))
        held += data
        messages: list[bytes] = []
        start = 0
        while len(held) - start >= _PREFIX:
            end = start + _PREFIX + self._length(held, start)
            if len(held) < end:
                break
            messages.append(bytes(held[start + _PREFIX : end]))
            start = end
        del held[:start]
        self._reserve(len(held))
        return messages

    def _reserve(self, size: int) -> None:
        beyond = max(0, size - SPARE_BYTES)
        if beyond <= self._reserved:
            self._budget.give_back(self._reserved - beyond)
        elif not self._budget.take(beyond - self._reserved):
            raise NoRoom("too much is being held of messages that have not come whole")
        self._reserved = beyond

    def _length(self, data: bytes | bytearray, start: int = 0) -> int:
        if data[start]:
            raise CompressedMessage("compressed messages are not understood here")
        length = int.from_bytes(data[start + 1 : start + _PREFIX], "big")
        if length > self._limit:
            raise MessageTooLarge(f"a message of {length} bytes; at most {self._limit} are taken")
        return length
