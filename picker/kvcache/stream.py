"""One engine's event messages, put back in order: sequence numbers, gaps, replays, duplicates, restarts. No
IO.

An engine numbers its messages from 0 and keeps the latest ones to send again on request. Messages get lost (a
slow network, a subscriber that came late), and a restarted engine counts from 0 again with an empty cache.
The rule behind every decision here: an engine may be credited with less than it has, never with more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from xxhash import xxh3_64_intdigest

from picker.kvcache.engine_blocks import EngineBlocks
from picker.kvcache.events import decode_batch

_REMEMBERED = 256


@dataclass(slots=True)
class StreamStats:
    """Monotonic counters, in messages unless said otherwise. May be shared by several streams."""

    live: int = 0
    replayed: int = 0
    bad_frames: int = 0  # not in the form of a message: skipped
    duplicates: int = 0
    gaps: int = 0  # times that the sequence jumped ahead
    missed: int = 0  # messages in those gaps
    replays: int = 0  # replay requests
    replay_failures: int = 0  # requests not answered to the end
    losses: int = 0  # times that an endpoint's entries were dropped because events are lost for good
    restarts: int = 0  # of engines
    joined_late: int = 0  # streams taken up in the middle, without what came before
    unknown_events: int = 0  # events of an unknown type
    malformed_events: int = 0  # events that could not be read


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What may wait while a replay is under way, per stream."""

    messages: int = 10_000
    bytes: int = 64 * 1024 * 1024


class _Purpose(Enum):
    """Why a replay was asked for."""

    JOIN = auto()  # to learn what the engine stored before we came
    FILL = auto()  # to fill a gap
    CHECK = auto()  # after a reconnection: is it still the same process?


class EventStream:
    """The order of one engine's messages; applies them to its blocks.

    Feed it what comes in. Methods that return a number ask for a replay from that sequence number on; its
    answers go to `replayed`, its end to `replay_ended` or `replay_failed`. At most one replay is under way at
    a time, and live messages wait for it. With `can_replay` False none is ever asked for.
    """

    def __init__(
        self,
        blocks: EngineBlocks,
        *,
        can_replay: bool,
        limits: StreamLimits = StreamLimits(),
        stats: StreamStats | None = None,
    ) -> None:
        self.blocks = blocks
        self.stats = stats if stats is not None else StreamStats()
        #: The next sequence number in order, None before the first message.
        self.expected: int | None = None
        self._can_replay = can_replay
        self._limits = limits
        self._replay: _Purpose | None = None
        self._progress = False  # the replay under way has given something new
        self._recent = [0] * _REMEMBERED  # digests of the latest messages, a ring by sequence number
        self._waiting: deque[tuple[int, bytes]] = deque()  # live messages, for the end of the replay
        self._waiting_bytes = 0

    @property
    def replaying(self) -> bool:
        return self._replay is not None

    @property
    def waiting(self) -> int:
        """Live messages held until the replay under way ends."""
        return len(self._waiting)

    # Input

    def connected(self) -> int | None:
        """The connection to the engine stands, for the first time or again."""
        if self._replay is not None:
            return None
        if self._can_replay:
            # The engine may be a new process, even one that has already counted past where the old one was:
            # ask for the last message again and compare.
            return self._ask(_Purpose.JOIN if self.expected is None else _Purpose.CHECK)
        if self.expected is not None:
            self._lose()
        return None

    def live(self, seq: int, payload: bytes) -> int | None:
        """A message came from the engine."""
        self.stats.live += 1
        if self._replay is None:
            return self._take(seq, payload)
        self._hold(seq, payload)
        if len(self._waiting) > self._limits.messages or self._waiting_bytes > self._limits.bytes:
            return self._give_up()
        return None

    def replayed(self, seq: int, payload: bytes) -> int | None:
        """A message came in answer to the replay request."""
        if self._replay is None:
            return None
        self.stats.replayed += 1
        if self._replay is _Purpose.CHECK and not self._progress:
            self._progress = True
            if not self._is_last(seq, payload):
                return self._restart()
            return None
        while self._waiting and (self.expected or 0) <= self._waiting[0][0] < seq:
            # The engine no longer has this one, but we do.
            if (start := self._fill(*self._waiting[0])) is not None:
                return start
            self._unhold()
        if (start := self._fill(seq, payload)) is not None:
            return start
        if self._waiting and self._waiting[0] == (seq, payload):
            self._unhold()
            self.stats.duplicates += 1
        return None

    def replay_ended(self) -> int | None:
        """The engine has sent everything that it had from the requested number on."""
        if self._replay is _Purpose.CHECK and not self._progress:
            return self._restart()
        return self._resume()

    def replay_failed(self) -> int | None:
        """The answer stopped before its end, or none came."""
        if self._replay is None:
            return None
        self.stats.replay_failures += 1
        if self._progress:
            return self._ask(_Purpose.FILL)
        return self._resume()

    # Steps

    def _fill(self, seq: int, payload: bytes) -> int | None:
        """Take in the next message of a replay; one from before what is expected is known already."""
        if self.expected is not None and seq < self.expected:
            return None
        if self.expected is not None and seq > self.expected:
            if self._progress:
                # Lost on the way: a fast answer can overflow the engine's socket. The rest may still be there.
                return self._ask(_Purpose.FILL)
            self._lose()
        elif self.expected is None and seq > 0:
            self.stats.joined_late += 1
        self._progress = True
        self._apply(seq, payload)
        return None

    def _take(self, seq: int, payload: bytes) -> int | None:
        """Take a live message in, in state."""
        expected = self.expected
        if expected is None:
            if seq == 0:
                self._apply(seq, payload)
            elif self._can_replay:
                self._hold(seq, payload)
                return self._ask(_Purpose.JOIN)
            else:
                self.stats.joined_late += 1
                self._apply(seq, payload)
        elif seq == expected:
            self._apply(seq, payload)
        elif seq > expected:
            self.stats.gaps += 1
            self.stats.missed += seq - expected
            if self._can_replay:
                self._hold(seq, payload)
                return self._ask(_Purpose.FILL)
            self._lose()
            self._apply(seq, payload)
        elif self._is_recent(seq, payload):
            self.stats.duplicates += 1
        else:
            self._forget()
            return self._take(seq, payload)
        return None

    def _apply(self, seq: int, payload: bytes) -> None:
        self.expected = seq + 1
        self._recent[seq % _REMEMBERED] = _digest(seq, payload)
        batch = decode_batch(payload)
        if batch.unknown or batch.malformed:
            self.stats.unknown_events += batch.unknown
            self.stats.malformed_events += batch.malformed
        self.blocks.apply(batch.events)

    def _ask(self, purpose: _Purpose) -> int:
        self._replay = purpose
        self._progress = False
        self.stats.replays += 1
        expected = self.expected or 0
        return max(expected - 1, 0) if purpose is _Purpose.CHECK else expected

    def _resume(self) -> int | None:
        """The replay is over. Take the messages that waited; what is still missing before them is lost."""
        purpose, self._replay = self._replay, None
        if purpose is _Purpose.CHECK:
            if not self._progress:
                self._lose()
        elif self._waiting:
            first = self._waiting[0][0]
            if self.expected is None and first > 0:
                self.stats.joined_late += 1
                self.expected = first
            elif self.expected is not None and first > self.expected:
                self._lose()
                self.expected = first
        while self._waiting:
            if (start := self._take(*self._unhold())) is not None:
                # Taking it has put it back at the end: it belongs before the ones that still wait.
                self._waiting.rotate(1)
                return start
        return None

    def _restart(self) -> int:
        """The engine is a new process: its cache is another one, with a history of its own."""
        self._forget()
        return self._ask(_Purpose.JOIN)

    def _forget(self) -> None:
        self.stats.restarts += 1
        self.blocks.clear()
        self._recent = [0] * _REMEMBERED
        self.expected = None

    def _lose(self) -> None:
        """Events are gone for good: what the engine still has of the old blocks is unknown."""
        self.stats.losses += 1
        self.blocks.clear()

    def _give_up(self) -> int | None:
        """Too much waits for the replay: go on without it."""
        self.stats.replay_failures += 1
        return self._resume()

    def _hold(self, seq: int, payload: bytes) -> None:
        self._waiting.append((seq, payload))
        self._waiting_bytes += len(payload)

    def _unhold(self) -> tuple[int, bytes]:
        seq, payload = self._waiting.popleft()
        self._waiting_bytes -= len(payload)
        return seq, payload

    def _is_last(self, seq: int, payload: bytes) -> bool:
        return self.expected == seq + 1 and self._is_recent(seq, payload)

    def _is_recent(self, seq: int, payload: bytes) -> bool:
        """Was this very message applied lately?"""
        return self._recent[seq % _REMEMBERED] == _digest(seq, payload)


def _digest(seq: int, payload: bytes) -> int:
    return xxh3_64_intdigest(payload, seq)
