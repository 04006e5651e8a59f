"""gRPC messages in the bytes of a stream: a flag, four bytes of length, the message. No IO.

Source: the gRPC over HTTP/2 protocol, "Length-Prefixed-Message".
"""

from __future__ import annotations

_PREFIX = 5


class BadFraming(Exception):
    """The bytes are no message that can be taken."""


class CompressedMessage(BadFraming):
    """Nobody was told that compression is understood here."""


class MessageTooLarge(BadFraming):
    """Longer than the limit."""


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


class MessageReader:
    """Puts one call's messages together, each of at most `limit` bytes, from pieces cut anywhere."""

    __slots__ = ("_held", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()

    def read(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes. Raises `BadFraming`; what comes after that means nothing."""
        if not self._held and len(data) >= _PREFIX and self._length(data) == len(data) - _PREFIX:
            return [data[_PREFIX:]]
        held = self._held
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
        return messages

    def _length(self, data: bytes | bytearray, start: int = 0) -> int:
        if data[start]:
            raise CompressedMessage("compressed messages are not understood here")
        length = int.from_bytes(data[start + 1 : start + _PREFIX], "big")
        if length > self._limit:
            raise MessageTooLarge(f"a message of {length} bytes; at most {self._limit} are taken")
        return length
