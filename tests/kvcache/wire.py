"""Engine events for tests: token blocks, hashes as an engine would make them, and every layout on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from xxhash import xxh64_intdigest

from picker.kvcache.events import BlockRemoved, BlockStored

SIZE = 16

_ROW_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def tokens(blocks: int, *, start: int = 0, size: int = SIZE) -> list[int]:
    """`blocks` blocks of token ids, all different."""
    return list(range(1000 + start * size, 1000 + (start + blocks) * size))


def hashes(token_ids: Sequence[int], *, size: int = SIZE, parent: int | None = None) -> list[int]:
    """What some engine calls these blocks: unsigned 64-bit, chained, and none of our business."""
    result: list[int] = []
    for start in range(0, len(token_ids) - size + 1, size):
        parent = xxh64_intdigest(f"{parent} {token_ids[start : start + size]}".encode())
        result.append(parent)
    return result


def stored(
    token_ids: Sequence[int], *, parent: int | None = None, size: int = SIZE, **fields: Any
) -> BlockStored:
    """A store of consecutive blocks under the hashes of `hashes`."""
    names = fields.pop("block_hashes", None) or hashes(token_ids, size=size, parent=parent)
    return BlockStored(names, parent, list(token_ids), size, **fields)


def removed(block_hashes: Sequence[int], **fields: Any) -> BlockRemoved:
    return BlockRemoved(list(block_hashes), **fields)


def as_map(event: msgspec.Struct) -> dict[str, Any]:
    """The layout of vLLM from 0.24 on: a map with a type."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return fields


def as_row(event: msgspec.Struct, length: int | None = None) -> list[Any]:
    """The layout of older engines: the type, then fields by position, all of them or only the first `length`."""
    fields = as_map(event)
    tag = fields["type"]
    return [tag, *(fields.get(name) for name in _ROW_FIELDS[tag][:length])]


def payload(*events: Any, timestamp: float = 1.0, rank: int | None = 0) -> bytes:
    """A batch; events that are structs go as maps, everything else as it is."""
    body = [as_map(event) if isinstance(event, msgspec.Struct) else event for event in events]
    return msgspec.msgpack.encode([timestamp, body, rank])
