"""The decision log: bounded, newest first, and watched without holding anybody up."""

from __future__ import annotations

from picker.telemetry import DecisionLog, DecisionRecord


def record(number: int) -> DecisionRecord:
    return DecisionRecord(id=str(number), at=0.0, policy_class="a", outcome="dispatched")


def test_only_the_last_ones_are_kept_newest_first() -> None:
    log = DecisionLog(size=3)
    for number in range(5):
        log.add(record(number))
    assert [entry.id for entry in log] == ["4", "3", "2"]
    assert log.get("1") is None
    assert log.get("4") == record(4)


async def test_a_log_of_size_zero_keeps_nothing_but_can_be_watched() -> None:
    log = DecisionLog(size=0)
    watcher = log.watch()
    log.add(record(1))
    assert len(log) == 0
    assert await anext(aiter(watcher)) == (record(1), 0)


async def test_a_slow_reader_misses_some_and_is_told_how_many() -> None:
    log = DecisionLog()
    watcher = log.watch(backlog=2)
    for number in range(5):
        log.add(record(number))
    reader = aiter(watcher)
    assert [(await anext(reader))[0].id for _ in range(2)] == ["0", "1"]
    log.add(record(5))
    assert await anext(reader) == (record(5), 3)
    log.add(record(6))
    assert await anext(reader) == (record(6), 0)


def test_a_closed_watcher_hears_nothing() -> None:
    log = DecisionLog()
    watcher = log.watch()
    watcher.close()
    log.add(record(1))
    assert not log._watchers
