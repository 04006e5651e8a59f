"""Replies that wait to be sent on one stream, in order."""

from __future__ import annotations

from collections import deque

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from picker.extproc.body import PieceQueue
from picker.extproc.messages import request_piece, response_piece


class Outbox:
    """Whole replies and bodies being cut into pieces, first in, first out.

    Response chunks that wait next to each other share a queue and so leave in as few messages as they fit in.
    """

    __slots__ = ("_queue", "_request_body", "_response_body")

    def __init__(self) -> None:
        self._queue: deque[ProcessingResponse | PieceQueue] = deque()
        self._request_body = PieceQueue()
        self._response_body = PieceQueue()

    @property
    def request_body_waits(self) -> bool:
        return bool(self._request_body)

    @property
    def request_bytes_waiting(self) -> int:
        return self._request_body.waiting_bytes

    @property
    def response_bytes_waiting(self) -> int:
        return self._response_body.waiting_bytes

    def put(self, reply: ProcessingResponse) -> None:
        self._queue.append(reply)

    def put_request_body(self, body: bytes, ends: bool) -> None:
        """The request's body, from the first byte on. Without `ends`, trailers or more of it are to follow."""
        self._put_pieces(self._request_body, body, ends)

    def put_response_chunk(self, data: bytes, ends: bool) -> None:
        self._put_pieces(self._response_body, data, ends)

    def clear(self) -> None:
        self._queue.clear()
        self._request_body.clear()
        self._response_body.clear()

    def take(self) -> ProcessingResponse | None:
        """The next message to send; None when nothing waits."""
        queue = self._queue
        while queue:
            first = queue[0]
            if not isinstance(first, PieceQueue):
                return queue.popleft()
            if first:
                build = request_piece if first is self._request_body else response_piece
                return build(*first.take())
            queue.popleft()
        return None

    def _put_pieces(self, pieces: PieceQueue, data: bytes, ends: bool) -> None:
        pieces.add(data)
        if ends:
            pieces.end()
        if not self._queue or self._queue[-1] is not pieces:
            self._queue.append(pieces)
