"""Fair turns on the event loop, and at replays."""

from __future__ import annotations

import asyncio

import pytest

from picker.kvcache.pump import Pump, Turnstile


class Reader:
    """Has `left` bytes to read, in messages of 100."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, budget: int) -> int:
        read = min(self.left, -(-budget // 100) * 100)
        self.left -= read
        return read


async def test_a_pass_of_the_loop_reads_about_the_budget_however_many_are_waiting() -> None:
    pump, readers = Pump(1000, turn=300), [Reader(5000) for _ in range(50)]
    for reader in readers:
        pump.wake(reader)
    left = 50 * 5000
    while left:
        await asyncio.sleep(0)
        now = sum(reader.left for reader in readers)
        assert left - now <= 1000 + 300
        left = now


async def test_everybody_gets_a_turn_before_anybody_gets_a_second_one() -> None:
    pump, flood, single = Pump(1000, turn=500), Reader(10**9), Reader(100)
    pump.wake(flood)
    await asyncio.sleep(0)
    pump.wake(single)
    await asyncio.sleep(0)
    assert single.left == 0
    pump.forget(flood)


async def test_a_reader_that_is_forgotten_is_not_called_again() -> None:
    pump, reader = Pump(1000, turn=500), Reader(10_000)
    pump.wake(reader)
    await asyncio.sleep(0)
    left = reader.left
    pump.forget(reader)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < reader.left == left


async def test_an_error_in_one_reader_is_reported_and_the_others_go_on() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _loop, context: reported.append(context["exception"])
    )
    error = RuntimeError("a fault")

    def faulty(_budget: int) -> int:
        raise error

    pump, reader = Pump(1000, turn=500), Reader(700)
    pump.wake(faulty)
    pump.wake(reader)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (reader.left, reported) == (0, [error])


def test_a_turnstile_lets_a_limited_number_in_and_the_others_in_order() -> None:
    inside: list[str] = []
    turns = Turnstile(2)
    people = {name: (lambda name=name: inside.append(name)) for name in "abcde"}
    for name in "abcd":
        turns.enter(people[name])
    assert inside == ["a", "b"]
    turns.leave(people["c"])  # stops waiting
    turns.leave(people["a"])
    assert inside == ["a", "b", "d"]
    turns.leave(people["b"])
    turns.leave(people["d"])
    turns.enter(people["e"])
    assert inside == ["a", "b", "d", "e"]


@pytest.mark.parametrize("limit", [1, 3])
def test_a_turnstile_is_as_free_at_the_end_as_at_the_beginning(limit: int) -> None:
    turns, entered = Turnstile(limit), []
    people = [lambda: entered.append(1) for _ in range(10)]
    for _ in range(3):
        for go in people:
            turns.enter(go)
        for go in people:
            turns.leave(go)
    entered.clear()
    for go in people:
        turns.enter(go)
    assert len(entered) == limit
