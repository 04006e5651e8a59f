"""Block tables that know their tokens: vLLM's hash chain, and the KV events that follow from it.

The chain is vLLM's default, `sha256` over a pickle, with the fixed root of 0.30 and later; the wire carries
the low 64 bits of each digest. With the same tokens, salt and adapter the hashes equal a real server's.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass, field

from picker.simulation.block_cache import BlockTable

_LOW_64_BITS = (1 << 64) - 1


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


ROOT = _digest("vllm-none-hash")


def wire_hash(digest: bytes) -> int:
    """The unsigned integer that events carry for a digest."""
    return int.from_bytes(digest, "big") & _LOW_64_BITS


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks became findable; `token_ids` holds those of all of them, end to end."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_name: str | None
    extra_keys: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hash: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class TokenTable(BlockTable):
    """A request's table with its tokens: the prompt, then what will be generated.

    `salt` isolates its cache from other salts, `adapter` is its LoRA name. Real vLLM also hashes the
    adapter's path, which a mock does not have.
    """

    __slots__ = ("adapter", "block_size", "salt", "tokens")

    def __init__(
        self, tokens: list[int], block_size: int, salt: str | None = None, adapter: str | None = None
    ) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.salt = salt
        self.adapter = adapter
        super().__init__(self._chain())

    def _chain(self) -> list[int]:
        keys: list[int] = []
        parent = ROOT
        for index in range(len(self.tokens) // self.block_size):
            tokens = tuple(self.tokens[index * self.block_size : (index + 1) * self.block_size])
            parent = _digest((parent, tokens, self._extra(index)))
            keys.append(wire_hash(parent))
        return keys

    def _extra(self, index: int) -> tuple[tuple[str, ...], ...] | None:
        tagged: list[tuple[str, ...]] = []
        if self.adapter is not None:
            tagged.append(("lora", self.adapter, ""))
        if self.salt is not None and index == 0:
            tagged.append(("cache_salt", self.salt))
        return tuple(tagged) or None

    def stored_event(self, first: int, last: int) -> BlockStored:
        """The event for blocks `first` (inclusive) to `last` (exclusive)."""
        return BlockStored(
            block_hashes=tuple(self.keys[first:last]),
            parent_block_hash=self.keys[first - 1] if first else None,
            token_ids=tuple(self.tokens[first * self.block_size : last * self.block_size]),
            block_size=self.block_size,
            lora_name=self.adapter,
            extra_keys=tuple(self._wire_extra(index) for index in range(first, last)),
        )

    def _wire_extra(self, index: int) -> tuple[str, ...] | None:
        """Extra keys as events carry them: untagged."""
        extra = self._extra(index)
        return tuple(item[1] for item in extra) if extra else None


@dataclass(slots=True)
class EventRecorder:
    """A cache listener that keeps what happened until it is taken, one batch for an engine step."""

    _pending: list[CacheEvent] = field(default_factory=list)

    def stored(self, table: BlockTable, first: int, last: int) -> None:
        if not isinstance(table, TokenTable):
            raise TypeError("KV events need tables that know their tokens")
        self._pending.append(table.stored_event(first, last))

    def removed(self, key: int) -> None:
        self._pending.append(BlockRemoved(key))

    def cleared(self) -> None:
        self._pending.append(AllBlocksCleared())

    def take(self) -> tuple[CacheEvent, ...]:
        events = tuple(self._pending)
        self._pending.clear()
        return events
