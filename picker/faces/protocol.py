"""Messages as bytes: all that is said in one turn of the loop is one frame, its length (4 bytes) and a msgpack list.

The values of the rooms travel as they are, field by field, so that a field that is new needs nothing here. Block keys
travel packed, 8 bytes each. Both ends are the same program on the same machine, so no form has to be kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from picker.faces.messages import FromCore, FromFace
from picker.selection.prompt_keys import PromptKeys

Sent = TypeVar("Sent")
Received = TypeVar("Received")

# Far above what one turn of a loop can bring about: what claims to be longer is noise.
MAX_FRAME_BYTES = 1024**3
_LENGTH_BYTES = 4


class ProtocolError(Exception):
    """What came is nothing that the other end says: the connection is of no more use."""


class Framing(Generic[Sent, Received]):
    """One end of one connection. `receives` is the union of the messages that may come."""

    def __init__(self, receives: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
        self._decoder: msgspec.msgpack.Decoder[list[Received]] = msgspec.msgpack.Decoder(
            list[receives], dec_hook=_unpack
        )
        self._received = bytearray()

    def encode(self, messages: Sequence[Sent]) -> bytes:
        """One frame."""
        body = self._encoder.encode(messages)
        return len(body).to_bytes(_LENGTH_BYTES, "big") + body

    def feed(self, data: bytes) -> list[Received]:
        """The messages that are complete with these bytes. Raises ProtocolError."""
        self._received += data
        messages: list[Received] = []
        start, end = 0, len(self._received)
        while end - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            size = int.from_bytes(self._received[start:body], "big")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes")
            if body + size > end:
                break
            with memoryview(self._received) as view:
                messages += self._decode(view[body : body + size])
            start = body + size
        del self._received[:start]
        return messages

    def _decode(self, frame: memoryview) -> list[Received]:
        with frame:
            try:
                return self._decoder.decode(frame)
            except (msgspec.MsgspecError, ValueError, TypeError) as error:
                raise ProtocolError(f"a malformed frame: {error}") from error


def core_end() -> Framing[FromCore, FromFace]:
    return Framing(FromFace)


def face_end() -> Framing[FromFace, FromCore]:
    return Framing(FromCore)


def _pack(value: Any) -> Any:
    if isinstance(value, PromptKeys):
        keys = {
            size: [array("Q", chain).tobytes() for chain in chains] for size, chains in value.known().items()
        }
        return value.lengths, keys
    raise TypeError(f"{type(value).__name__} is no part of a message")


def _unpack(wanted: type, value: Any) -> Any:
    if wanted is PromptKeys:
        lengths, packed = value
        return PromptKeys.of_keys(
            lengths, {size: tuple(map(_keys, chains)) for size, chains in packed.items()}
        )
    raise TypeError(f"{wanted.__name__} is no part of a message")


def _keys(packed: bytes) -> list[int]:
    keys = array("Q")
    keys.frombytes(packed)
    return keys.tolist()
