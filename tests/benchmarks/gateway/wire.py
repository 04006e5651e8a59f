"""Just enough HTTP/1.1 to tell where a message ends; both ends of these connections are ours or Envoy."""

from __future__ import annotations


class Message:
    """One request or response, fed piece by piece. `head` and `received` (body bytes) are there once it is whole.

    The end of a chunked body is known by its last five bytes, which none of the benchmark's bodies contains.
    """

    __slots__ = ("_buffer", "_wanted", "head", "received")

    def __init__(self) -> None:
        self.head = b""
        self.received = 0
        self._buffer = b""
        self._wanted: int | None = None

    def feed(self, data: bytes) -> bool:
        """True once the message is whole."""
        if not self.head:
            self._buffer += data
            head, found, data = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return False
            self.head, self._buffer = head, b""
            self._wanted = _content_length(head)
        self.received += len(data)
        if self._wanted is not None:
            return self.received >= self._wanted
        self._buffer = (self._buffer + data)[-5:]
        return self._buffer == b"0\r\n\r\n"

    @property
    def status(self) -> int:
        return int(self.head[9:12])


def _content_length(head: bytes) -> int | None:
    """None: chunked."""
    lower = head.lower()
    _, found, rest = lower.partition(b"\r\ncontent-length: ")
    if found:
        return int(rest.split(b"\r\n", 1)[0])
    return None if b"transfer-encoding: chunked" in lower else 0
