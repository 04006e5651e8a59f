"""KV cache events as engines put them on the wire: one msgpack payload -> a batch of typed events.

A batch is an array `[timestamp, [event, ...], rank]`. An event is an array `["BlockStored", hashes, ...]`
(vLLM up to 0.23, SGLang up to 0.5.15) or a map `{"type": "BlockStored", ...}` (later ones, TensorRT-LLM);
fields were added at the end over time and are absent or nil where an engine has nothing to say. Hashes are
integers, signed or not, or raw digests. What is not known is skipped: a field silently, an event with a
count, never the whole batch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """The engine now holds these consecutive blocks. `parent_block_hash` None: the first one starts a prompt.

    `token_ids` covers all blocks, `block_size` each; offload tiers may send no tokens. `extra_keys` has one
    entry per block, each None or a list of strings and `[media id, offset]` pairs; it is not validated here.
    """

    block_hashes: list[int]
    parent_block_hash: int | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None  # SGLang only, and only in maps


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """The engine dropped one copy of each of these blocks from one medium and cache group."""

    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The engine's prefix cache is empty."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredRow(BlockStored, array_like=True, tag="BlockStored", gc=False):
    def __post_init__(self) -> None:
        # A field that a later engine added at the end of its rows has landed here.
        self.cache_salt = None


class _RemovedRow(BlockRemoved, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ClearedRow(AllBlocksCleared, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class EventBatch(msgspec.Struct, gc=False):
    """One message of an engine. `rank` is its data parallel rank, None where it gives none.

    `unknown` counts events of a type that Picker does not know, `malformed` those that it could not read. A
    payload that is no batch at all is one malformed event.
    """

    timestamp: float
    events: list[Event]
    rank: int | None = None
    unknown: int = 0
    malformed: int = 0


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    timestamp: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    rank: int | None = None


class _RowBatch(msgspec.Struct, array_like=True, gc=False):
    timestamp: float
    events: list[_StoredRow | _RemovedRow | _ClearedRow]
    rank: int | None = None


class _Envelope(msgspec.Struct, array_like=True, gc=False):
    timestamp: Any
    events: list[msgspec.Raw]
    rank: Any = None


class _UnknownType(Exception):
    """An event of a type that is not ours to read."""


_map_batch = msgspec.msgpack.Decoder(_MapBatch)
_row_batch = msgspec.msgpack.Decoder(_RowBatch)
_envelope = msgspec.msgpack.Decoder(_Envelope)
_map_event = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_row_event = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)

# RecursionError comes of deep nesting, the others of bytes that are no msgpack or have the wrong shape.
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)


def decode_batch(payload: bytes) -> EventBatch:
    """Read one payload. Never raises: what cannot be read is counted in the batch."""
    for decoder in (_map_batch, _row_batch):
        # At once where every event has the usual form, which is nearly always.
        try:
            batch = decoder.decode(payload)
        except _UNREADABLE:
            continue
        return EventBatch(batch.timestamp, [*batch.events], batch.rank)
    return _decode_one_by_one(payload)


def _decode_one_by_one(payload: bytes) -> EventBatch:
    """Read a batch in which something is unusual, so that it costs nothing but itself."""
    try:
        envelope = _envelope.decode(payload)
    except _UNREADABLE:
        return EventBatch(0.0, [], malformed=1)
    batch = EventBatch(_number(envelope.timestamp), [], _integer(envelope.rank))
    for raw in envelope.events:
        try:
            batch.events.append(_decode_event(raw))
        except _UnknownType:
            batch.unknown += 1
        except _UNREADABLE:
            batch.malformed += 1
    return batch


def _decode_event(raw: msgspec.Raw) -> Event:
    for decoder in (_map_event, _row_event):
        try:
            event: Event = decoder.decode(raw)
        except _UNREADABLE:
            continue
        return event
    return _read_loosely(raw)


def _read_loosely(raw: msgspec.Raw) -> Event:
    """Read an event of unusual form: digests as hashes, tokens in pairs, odd optional fields."""
    value = msgspec.msgpack.decode(raw)
    if isinstance(value, dict):
        tag, fields = value.get("type"), value
    elif isinstance(value, list) and value:
        tag = value[0]
        names = _ROWS.get(tag, ()) if isinstance(tag, str) else ()
        fields = dict(zip(names, value[1:], strict=False))
    else:
        raise TypeError("an event is an array or a map")
    if not isinstance(tag, str):
        raise TypeError("an event has a type")
    if tag == "AllBlocksCleared":
        return AllBlocksCleared()
    if tag not in _ROWS:
        raise _UnknownType(tag)
    hashes = [_block_hash(item) for item in fields["block_hashes"]] if "block_hashes" in fields else []
    if not hashes:
        raise ValueError("no block hashes")
    if tag == "BlockRemoved":
        return BlockRemoved(hashes, _text(fields.get("medium")), _integer(fields.get("group_idx")))
    return _stored(hashes, fields)


def _stored(hashes: list[int], fields: dict[str, Any]) -> BlockStored:
    parent = fields.get("parent_block_hash")
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if parent is None else _block_hash(parent),
        token_ids=[_token(item) for item in fields.get("token_ids") or ()],
        block_size=_integer(fields.get("block_size")) or 0,
        lora_id=_integer(fields.get("lora_id")),
        medium=_text(fields.get("medium")),
        lora_name=_text(fields.get("lora_name")),
        extra_keys=fields.get("extra_keys"),
        group_idx=_integer(fields.get("group_idx")),
        kv_cache_spec_kind=_text(fields.get("kv_cache_spec_kind")),
        kv_cache_spec_sliding_window=_integer(fields.get("kv_cache_spec_sliding_window")),
        cache_salt=_text(fields.get("cache_salt")),
    )


# Field names by type, in the order of rows. The salt is only in maps.
_ROWS: dict[str, tuple[str, ...]] = {
    "BlockStored": tuple(name for name in BlockStored.__struct_fields__ if name != "cache_salt"),
    "BlockRemoved": BlockRemoved.__struct_fields__,
    "AllBlocksCleared": (),
}


def _block_hash(value: object) -> int:
    """An integer as it is, a digest as its last 8 bytes: what vLLM itself sends when asked for integers."""
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TypeError("a block hash is an integer or bytes")


def _token(value: object) -> int:
    """A token id; of a pair (speculative decoding's bigrams: a token and its follower) the first."""
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TypeError("a token id is an integer")


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
