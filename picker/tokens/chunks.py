"""The tokenization cache: ids of parts of texts, each part once, bounded in bytes."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

# What an entry takes beside its text and its ids: objects, table slots, links.
_OVERHEAD = 320


class ChunkCache:
    """Ids by (tokenizer, part of a text), the least recently used forgotten first. Safe for use from threads.

    Parts are looked up by their text, so a hit is exact. `max_bytes` counts texts and ids; 0 turns the cache off.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, str], array[int]] = OrderedDict()
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def find(self, tokenizer: int, parts: Sequence[str]) -> list[array[int] | None]:
        """The ids of each part, None where they are not known. The arrays are shared: do not change them."""
        with self._lock:
            entries = self._entries
            found = [entries.get((tokenizer, part)) for part in parts]
            for part, ids in zip(parts, found, strict=True):
                if ids is not None:
                    entries.move_to_end((tokenizer, part))
            missing = found.count(None)
            self.hits += len(found) - missing
            self.misses += missing
        return found

    def store(
        self, tokenizer: int, found: Mapping[str, array[int]] | Iterable[tuple[str, array[int]]]
    ) -> None:
        """Remember the ids of parts."""
        with self._lock:
            for part, ids in dict(found).items():
                size = _size(part, ids)
                if size > self._max_bytes or (tokenizer, part) in self._entries:
                    continue
                self._entries[tokenizer, part] = ids
                self.size_bytes += size
            while self.size_bytes > self._max_bytes:
                (_, part), ids = self._entries.popitem(last=False)
                self.size_bytes -= _size(part, ids)
                self.evictions += 1

    def __len__(self) -> int:
        return len(self._entries)


def _size(part: str, ids: array[int]) -> int:
    return part.__sizeof__() + ids.itemsize * len(ids) + _OVERHEAD
