"""The order of an engine's messages, without sockets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.kvcache.engine_blocks import EngineBlocks
from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys
from picker.kvcache.stream import EventStream, StreamLimits
from tests.kvcache.wire import SIZE, hashes, payload, removed, stored, tokens


@dataclass
class Engine:
    """An engine process: each message of its life stores one more block of a prompt of its own."""

    start: int = 0  # first token block: another process has another prompt
    length: int = 100
    prompt: list[int] = field(init=False)
    history: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = tokens(self.length, start=self.start)
        names = hashes(self.prompt)
        self.history = [
            payload(
                stored(
                    self.prompt[n * SIZE : (n + 1) * SIZE],
                    parent=names[n - 1] if n else None,
                    block_hashes=[names[n]],
                ),
                timestamp=float(self.start * 1000 + n),
            )
            for n in range(self.length)
        ]

    def removal(self, block: int) -> bytes:
        return payload(removed([hashes(self.prompt)[block]]))


class Follower:
    """A stream with its own index. Remembers what it asked for."""

    def __init__(self, *, can_replay: bool = True, limits: StreamLimits | None = None) -> None:
        self.index = KvIndex()
        self.stream = EventStream(
            EngineBlocks(0, self.index), can_replay=can_replay, limits=limits or StreamLimits()
        )
        self.asked: list[int] = []

    def live(self, engine: Engine, *seqs: int) -> None:
        for seq in seqs:
            self._note(self.stream.live(seq, engine.history[seq]))

    def connect(self) -> None:
        self._note(self.stream.connected())

    def answer(self, engine: Engine, *seqs: int) -> None:
        """Replay these messages, without the end mark."""
        for seq in seqs:
            self._note(self.stream.replayed(seq, engine.history[seq]))

    def end(self) -> None:
        self._note(self.stream.replay_ended())

    def fail(self) -> None:
        self._note(self.stream.replay_failed())

    def cached(self, engine: Engine) -> int:
        match = self.index.find_matches(block_keys(engine.prompt, SIZE), 1).get(0)
        return match.blocks if match else 0

    def _note(self, start: int | None) -> None:
        if start is not None:
            self.asked.append(start)


def test_messages_in_order_are_applied_as_they_come() -> None:
    engine, follower = Engine(), Follower()
    follower.live(engine, 0, 1, 2)
    assert (follower.cached(engine), follower.asked) == (3, [])


def test_a_gap_is_filled_from_the_first_missing_message() -> None:
    """C32."""
    engine, follower = Engine(), Follower()
    follower.live(engine, 0, 1, 2, 6, 7)
    assert (follower.asked, follower.cached(engine), follower.stream.waiting) == ([3], 3, 2)
    follower.answer(engine, 3, 4, 5, 6)
    follower.end()
    follower.live(engine, 8)
    assert (follower.asked, follower.cached(engine)) == ([3], 9)
    stats = follower.stream.stats
    assert (stats.gaps, stats.missed, stats.duplicates, stats.losses) == (1, 3, 1, 0)


def test_a_duplicate_is_applied_once() -> None:
    """Stored twice would survive its removal."""
    engine, follower = Engine(), Follower()
    follower.live(engine, 0, 1, 1, 0)
    follower.stream.live(2, engine.removal(1))
    assert (follower.cached(engine), follower.stream.stats.duplicates, follower.asked) == (1, 2, [])


@pytest.mark.parametrize("how", ["end", "fail"])
def test_what_no_replay_brings_back_is_lost_and_nothing_old_is_credited(how: str) -> None:
    """C32: the lost messages may have removed anything."""
    engine, follower = Engine(), Follower()
    follower.live(engine, 0, 1, 2, 6)
    getattr(follower, how)()
    assert (follower.cached(engine), len(follower.index), follower.stream.stats.losses) == (0, 0, 1)
    follower.live(engine, 7)
    assert (follower.asked, follower.stream.stats.losses) == ([3], 1)


def test_a_replay_that_no_longer_reaches_back_far_enough() -> None:
    engine, follower = Engine(), Follower()
    follower.live(engine, 0, 1, 2, 9)
    follower.answer(engine, 5, 6, 7, 8, 9)
    follower.end()
    assert (follower.cached(engine), follower.stream.stats.losses, follower.asked) == (0, 1, [3])
    assert follower.stream.expected == 10


def test_without_a_replay_address_a_gap_is_a_loss_at_once() -> None:
    engine, follower = Engine(), Follower(can_replay=False)
    follower.live(engine, 0, 1, 2, 6, 7)
    assert (follower.cached(engine), follower.stream.stats.losses, follower.asked) == (0, 1, [])


def test_coming_late_asks_for_everything() -> None:
    """C32: the first live message has number 57."""
    engine, follower = Engine(), Follower()
    follower.live(engine, 57)
    assert follower.asked == [0]
    follower.answer(engine, *range(58))
    follower.end()
    assert (follower.cached(engine), follower.stream.stats.losses) == (58, 0)


def test_coming_late_to_an_engine_that_remembers_only_the_end() -> None:
    engine, follower = Engine(), Follower()
    follower.live(engine, 57)
    follower.answer(engine, 50, 51, 52)
    follower.answer(engine, 53, 54, 55, 56, 57)
    follower.end()
    assert (follower.cached(engine), follower.stream.expected, follower.stream.stats.joined_late) == (
        0,
        58,
        1,
    )


def test_coming_late_without_a_replay_address() -> None:
    engine, follower = Engine(), Follower(can_replay=False)
    follower.live(engine, 57, 58)
    assert (follower.stream.expected, follower.stream.stats.joined_late, follower.stream.stats.gaps) == (
        59,
        1,
        0,
    )


def test_a_warm_engine_is_learned_on_connection_before_it_says_anything() -> None:
    engine, follower = Engine(), Follower()
    follower.connect()
    follower.answer(engine, *range(10))
    follower.end()
    assert (follower.asked, follower.cached(engine)) == ([0], 10)
    follower.live(engine, 10)
    assert (follower.asked, follower.cached(engine)) == ([0], 11)


def test_a_new_engine_has_nothing_to_replay() -> None:
    engine, follower = Engine(), Follower()
    follower.connect()
    follower.end()
    follower.live(engine, 0, 1)
    assert (follower.asked, follower.cached(engine)) == ([0], 2)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_lower_number_is_a_restart(first: int) -> None:
    """The old process's blocks are gone, whatever of the new one's beginning we missed."""
    old, new, follower = Engine(), Engine(start=500), Follower()
    follower.live(old, 0, 1, 2, 3, 4)
    follower.live(new, first)
    if first:
        assert follower.asked == [0]
        follower.answer(new, *range(first + 1))
        follower.end()
    assert (follower.cached(old), follower.cached(new), follower.stream.stats.restarts) == (0, first + 1, 1)


def test_after_a_reconnection_the_same_process_goes_on_where_it_was() -> None:
    engine, follower = Engine(), Follower()
    follower.live(engine, 0, 1, 2)
    follower.connect()
    assert follower.asked == [2]
    follower.live(engine, 5)
    follower.answer(engine, 2, 3, 4, 5)
    follower.end()
    assert (follower.cached(engine), follower.asked) == (6, [2])
    assert (follower.stream.stats.restarts, follower.stream.stats.losses, follower.stream.stats.gaps) == (
        0,
        0,
        0,
    )


def test_a_new_process_that_has_already_counted_further_is_found_out() -> None:
    """By sequence numbers alone it would look like a gap, and the old blocks would stay credited for ever."""
    old, new, follower = Engine(), Engine(start=500), Follower()
    follower.live(old, 0, 1, 2)
    follower.connect()
    follower.answer(new, 2)
    assert follower.asked == [2, 0]
    follower.answer(new, 0, 1, 2, 3, 4, 5)
    follower.end()
    assert (follower.cached(old), follower.cached(new), follower.stream.stats.restarts) == (0, 6, 1)


def test_a_new_process_that_has_said_nothing_yet_is_found_out() -> None:
    old, follower = Engine(), Follower()
    follower.live(old, 0, 1, 2)
    follower.connect()
    follower.end()
    assert (follower.asked, len(follower.index)) == ([2, 0], 0)


@pytest.mark.parametrize("can_replay", [True, False])
def test_where_nobody_can_tell_whether_it_is_the_same_process_nothing_is_credited(can_replay: bool) -> None:
    engine, follower = Engine(), Follower(can_replay=can_replay)
    follower.live(engine, 0, 1, 2)
    follower.connect()
    follower.fail()
    assert (len(follower.index), follower.stream.stats.losses) == (0, 1)
    follower.live(engine, 3)
    assert (follower.stream.stats.gaps, follower.stream.expected) == (0, 4)


def test_a_restart_while_a_replay_is_under_way() -> None:
    old, new, follower = Engine(), Engine(start=500), Follower()
    follower.live(old, 0, 1, 2, 6)
    follower.live(new, 0, 1)
    follower.fail()
    assert (follower.cached(old), follower.cached(new)) == (0, 2)
    assert follower.stream.stats.restarts == 1


def test_a_replay_that_breaks_off_is_asked_for_again_from_where_it_broke() -> None:
    engine, follower = Engine(), Follower()
    follower.live(engine, 0, 9)
    follower.answer(engine, 1, 2, 3)
    follower.fail()
    follower.answer(engine, 4, 5)
    follower.fail()
    follower.answer(engine, *range(6, 10))
    follower.end()
    assert (follower.asked, follower.cached(engine), follower.stream.stats.losses) == ([1, 4, 6], 10, 0)


def test_a_hole_in_a_replay_is_asked_for_again_and_then_taken_for_a_loss() -> None:
    engine, follower = Engine(), Follower()
    follower.live(engine, 0, 9)
    follower.answer(engine, 1, 2, 5)
    assert follower.asked == [1, 3]
    follower.answer(engine, 5, 6, 7, 8, 9)
    follower.end()
    assert (follower.asked, follower.cached(engine), follower.stream.stats.losses) == ([1, 3], 0, 1)


def test_a_second_gap_behind_the_first_is_filled_too() -> None:
    engine, follower = Engine(), Follower()
    follower.live(engine, 0, 3, 5, 6)
    follower.answer(engine, 1, 2)
    follower.end()
    assert follower.asked == [1, 4]
    follower.answer(engine, 4)
    follower.end()
    assert (follower.cached(engine), follower.stream.waiting) == (7, 0)


@pytest.mark.parametrize("limits", [StreamLimits(messages=5), StreamLimits(bytes=1000)], ids=repr)
def test_what_waits_for_a_replay_is_bounded(limits: StreamLimits) -> None:
    engine, follower = Engine(), Follower(limits=limits)
    follower.live(engine, 0, *range(5, 50))
    assert follower.stream.waiting == 0
    assert not follower.stream.replaying
    stats = follower.stream.stats
    assert (stats.losses, stats.replay_failures, follower.asked) == (1, 1, [1])
    follower.answer(engine, 1, 2, 3)
    follower.end()
    assert (follower.stream.expected, stats.losses) == (50, 1)


def test_a_batch_with_bad_events_is_counted_and_the_rest_applied() -> None:
    """C37: unknown types and garbage cost themselves, and the next message is in order."""
    engine, follower = Engine(), Follower()
    follower.live(engine, 0)
    follower.stream.live(1, b"garbage")
    follower.stream.live(2, payload({"type": "New"}))
    stats = follower.stream.stats
    assert (stats.malformed_events, stats.unknown_events, stats.gaps) == (1, 1, 0)
    assert follower.stream.expected == 3


LOSSES = st.lists(st.sampled_from(["deliver", "lose", "twice"]), min_size=1, max_size=40)


@given(LOSSES, st.integers(0, 40), st.data())
def test_whatever_is_lost_the_index_ends_equal_to_an_unbroken_run(
    fates: list[str], memory: int, data: st.DataObject
) -> None:
    """Or, where the engine no longer remembers what was lost, below it. Never above, at any time."""
    engine, follower = Engine(length=len(fates) + 1), Follower()
    truth = Follower()
    start: int | None = None
    seqs = [(seq, fate) for seq, fate in enumerate(fates)] + [(len(fates), "deliver")]
    for seq, fate in seqs:
        truth.live(engine, seq)
        times = {"deliver": 1, "lose": 0, "twice": 2}[fate]
        for _ in range(times):
            asked = follower.stream.live(seq, engine.history[seq])
            start = asked if asked is not None else start
        while start is not None and (seq == len(fates) or data.draw(st.booleans())):
            asked, start = start, None
            for old in range(max(asked, seq - memory), seq + 1):
                start = follower.stream.replayed(old, engine.history[old])
                if start is not None:
                    break
            else:
                start = follower.stream.replay_ended()
        assert follower.cached(engine) <= truth.cached(engine)
    assert not follower.stream.replaying
    assert follower.stream.expected == len(fates) + 1
    if memory >= len(fates):
        assert follower.cached(engine) == truth.cached(engine)
        assert follower.stream.stats.losses == follower.stream.stats.restarts == 0


STEPS = st.one_of(
    st.tuples(st.just("live"), st.booleans(), st.integers(0, 9)),
    st.tuples(st.just("answer"), st.booleans(), st.integers(0, 9)),
    st.tuples(st.sampled_from(["connect", "end", "fail"]), st.just(True), st.just(0)),
)


@given(st.lists(STEPS, max_size=40), st.booleans())
def test_no_order_of_things_gets_it_stuck(steps: list[tuple[str, bool, int]], can_replay: bool) -> None:
    """Two processes' messages, replies that nobody asked for, ends and failures, in any order."""
    engines = {True: Engine(length=10), False: Engine(start=500, length=10)}
    follower = Follower(can_replay=can_replay)
    for step, which, seq in steps:
        if step in ("live", "answer"):
            getattr(follower, step)(engines[which], seq)
        elif step == "connect" or follower.stream.replaying:
            getattr(follower, step)()
        assert follower.stream.replaying or not follower.stream.waiting
        assert can_replay or not follower.asked
    for _ in range(100):
        if not follower.stream.replaying:
            break
        follower.fail()
    assert (follower.stream.replaying, follower.stream.waiting) == (False, 0)
