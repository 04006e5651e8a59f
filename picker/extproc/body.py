"""Bodies in memory: how they are gathered, and how they are cut for sending."""

from __future__ import annotations

from collections import deque

# Gateways differ in how large an answer they take; 62,000 bytes is what the peers of this protocol send.
MAX_PIECE_BYTES = 62_000


class GatheredBody:
    """A request body that grows piece by piece.

    One piece is kept as it came, without a copy. More go into one buffer, so that a body of many tiny pieces
    takes no more memory than its bytes.
    """

    __slots__ = ("_buffer", "_single")

    def __init__(self) -> None:
        self._single = b""
        self._buffer: bytearray | None = None

    def add(self, data: bytes) -> None:
        if self._buffer is not None:
            self._buffer += data
        elif not self._single:
            self._single = data
        elif data:
            self._buffer = bytearray(self._single)
            self._buffer += data
            self._single = b""

    def whole(self) -> bytes:
        if self._buffer is not None:
            # Kept in this form only: two copies would be twice what the budget knows of.
            self._single, self._buffer = bytes(self._buffer), None
        return self._single


class PieceQueue:
    """Body bytes on their way out, handed over in pieces of at most `MAX_PIECE_BYTES`.

    Chunks that wait together leave together. After `end()` exactly one piece is marked as the last: the final
    one that waited, or an empty one if nothing was left to carry the mark. True while a piece waits.
    """

    __slots__ = ("_chunks", "_ending", "waiting_bytes")

    def __init__(self) -> None:
        self._chunks: deque[bytes | memoryview] = deque()
        self._ending = False
        self.waiting_bytes = 0

    def add(self, data: bytes) -> None:
        if len(data) > MAX_PIECE_BYTES:
            view = memoryview(data)
            self._chunks.extend(view[i : i + MAX_PIECE_BYTES] for i in range(0, len(data), MAX_PIECE_BYTES))
        elif data:
            self._chunks.append(data)
        self.waiting_bytes += len(data)

    def end(self) -> None:
        """No more bytes follow: mark the last piece."""
        self._ending = True

    def clear(self) -> None:
        self._chunks.clear()
        self._ending = False
        self.waiting_bytes = 0

    def __bool__(self) -> bool:
        return self._ending or bool(self._chunks)

    def take(self) -> tuple[bytes, bool]:
        """The next piece and whether it ends the body. Raises IndexError when there is none."""
        if not self._ending or self._chunks:
            piece = self._join_waiting()
            self.waiting_bytes -= len(piece)
        else:
            piece = b""
        last = self._ending and not self._chunks
        if last:
            self._ending = False
        return piece, last

    def _join_waiting(self) -> bytes:
        chunks = self._chunks
        first = chunks.popleft()
        size = len(first)
        if not chunks or size + len(chunks[0]) > MAX_PIECE_BYTES:
            return bytes(first)
        joined = [first]
        while chunks and (size := size + len(chunks[0])) <= MAX_PIECE_BYTES:
            joined.append(chunks.popleft())
        return b"".join(joined)
