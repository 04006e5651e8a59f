"""Arrivals written down for `picker replay` and the simulator: when, how long, how alike, which class.

No prompt can be read from it. Prompts appear as the hashes of their blocks, and tenants as names, both keyed with a
secret of this process that is written nowhere: equal means equal within one recording and nothing beyond it.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from picker.queueing.work import Work

# One hash stands for at least so many tokens: finer ones make files larger and replays no better.
BLOCK_TOKENS = 64

# JSON readers keep integers exactly up to 2**53.
_HASH_BITS = 53
_BACKLOG = 10_000


@dataclass(slots=True)
class RecordingStats:
    """Arrivals written, those given up because the file is full or the disk too slow, and bytes of the file."""

    written: int = 0
    lost: int = 0
    bytes: int = 0


Entry = tuple[dict[str, Any], Sequence[int]]


class Form:
    """How one recording is written: its secret, its clock, its block size. `clock` is that of the works' arrivals."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._epoch = time.time() - clock()
        self._secret = token_bytes(16)
        self._block_size: int | None = None

    def entry(self, work: Work, outcome: str, output_tokens: int | None, block_size: int) -> Entry:
        """Take from a request what is to be kept; cheap. output_tokens: None where nobody has told; then what the
        request allowed. block_size: the engines'; the first one holds for the whole recording.
        """
        if self._block_size is None:
            self._block_size = block_size
        stride = max(1, BLOCK_TOKENS // self._block_size)
        chains = work.demand.prompt.blocks(self._block_size)
        # Chained: the last key of a group of blocks stands for all of the prompt up to there.
        keys = chains[0][stride - 1 :: stride] if chains else ()
        record = {
            "timestamp": round((self._epoch + work.arrival) * 1000),
            "input_length": work.demand.raw_tokens,
            "output_length": work.expected_output_tokens if output_tokens is None else output_tokens,
            "block_size": self._block_size * stride,
            "policy_class": work.policy_class.name,
            "tenant": work.tenant,
            "outcome": outcome,
        }
        return record, keys

    def line(self, entry: Entry) -> str:
        """The entry with everything hashed; a millisecond for a long prompt. Any thread may ask."""
        record, keys = entry
        tenant = self._keyed(record["tenant"].encode()).hex() if record["tenant"] else ""
        kept = record | {"tenant": tenant, "hash_ids": [self._hash(key) for key in keys]}
        return json.dumps(kept, separators=(",", ":")) + "\n"

    def _hash(self, key: int) -> int:
        return int.from_bytes(self._keyed(key.to_bytes(8, "little"))) >> (64 - _HASH_BITS)

    def _keyed(self, value: bytes) -> bytes:
        return blake2b(value, digest_size=8, key=self._secret).digest()


class Recording:
    """Appends a JSON line for each arrival until the file has `max_bytes`. A thread of its own writes.

    Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int, clock: Callable[[], float]) -> None:
        self.stats = RecordingStats()
        self._max_bytes = max_bytes
        self._form = Form(clock)
        self._file = path.open("a", encoding="utf-8")
        self.stats.bytes = path.stat().st_size
        self._waiting: queue.Queue[Entry | None] = queue.Queue(_BACKLOG)
        self._thread = threading.Thread(target=self._write, args=(self._file,), name="recording", daemon=True)
        self._thread.start()

    def take(self, work: Work, outcome: str, output_tokens: int | None, block_size: int) -> None:
        """Write down a request that has ended or was refused; see `Form.entry`."""
        try:
            self._waiting.put_nowait(self._form.entry(work, outcome, output_tokens, block_size))
        except queue.Full:
            self.stats.lost += 1

    def close(self) -> None:
        """Write what waits, and end. Blocks."""
        self._waiting.put(None)
        self._thread.join()

    def _write(self, file: IO[str]) -> None:
        with file:
            while (entry := self._waiting.get()) is not None:
                line = self._form.line(entry)
                if self.stats.bytes + len(line) > self._max_bytes:
                    self.stats.lost += 1
                    continue
                try:
                    file.write(line)
                    # So that a recording can be read while it grows.
                    if self._waiting.empty():
                        file.flush()
                except OSError:
                    self.stats.lost += 1
                    continue
                self.stats.bytes += len(line)
                self.stats.written += 1
