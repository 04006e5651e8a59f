"""Booked load: exact at every step, and nobody's once its endpoint has left."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.pool.endpoint import Endpoint, EndpointSpec, EngineReport
from picker.pool.ledger import Booking, Ledger
from picker.pool.pool import Pool


class Books:
    """A pool of engines by name, and its ledger."""

    def __init__(self, *names: str) -> None:
        self.pool = Pool()
        self.ledger = Ledger(reports_to_reap=3)
        self.pool.subscribe(self.ledger.pool_changed)
        self.changed: list[str] = []
        self.ledger.on_change = lambda endpoint, load: self.changed.append(endpoint.spec.name)
        self.set(*names)

    def set(self, *names: str) -> None:
        self.pool.replace(EndpointSpec(name, name, f"10.0.0.{ord(name[0])}", 8000) for name in names)

    def engine(self, name: str) -> Endpoint:
        endpoint = self.pool.get(name)
        assert endpoint is not None
        return endpoint

    def load(self, name: str) -> tuple[int, int]:
        load = self.ledger.load(self.engine(name).slot)
        return load.prefill_tokens, load.running


def test_a_request_counts_twice_until_its_prefill_is_done_and_once_until_its_end() -> None:
    books = Books("a")
    booking = books.ledger.book(books.engine("a"), 500, 0.0)
    assert books.load("a") == (500, 1)
    books.ledger.prefill_done(booking)
    assert books.load("a") == (0, 1)
    books.ledger.release(booking)
    assert books.load("a") == (0, 0)
    assert books.changed == ["a"] * 3


def test_a_holder_weighs_what_it_was_last_booked_with_and_keeps_it_where_its_request_moves() -> None:
    books = Books("a", "b")
    books.ledger.book(books.engine("a"), 500, 0.0, "chat", 4)
    booking = books.ledger.book(books.engine("a"), 300, 0.0, "chat", 8)
    books.ledger.move(booking, books.engine("b"), 300, 1.0)
    first, second = (books.ledger.load(books.engine(name).slot).held["chat"] for name in "ab")
    assert (first.prefill_tokens, first.requests, first.weight) == (500, 1, 8)
    assert (second.prefill_tokens, second.requests, second.weight) == (300, 1, 8)


def test_everything_may_be_said_twice() -> None:
    books = Books("a")
    booking = books.ledger.book(books.engine("a"), 500, 0.0)
    for _ in range(2):
        books.ledger.prefill_done(booking)
    for _ in range(2):
        books.ledger.release(booking)
    books.ledger.prefill_done(booking)
    assert books.load("a") == (0, 0)
    assert (books.ledger.stats.booked, books.ledger.stats.released) == (1, 1)


def test_an_end_without_a_first_byte_frees_both() -> None:
    books = Books("a")
    books.ledger.release(books.ledger.book(books.engine("a"), 500, 0.0))
    assert books.load("a") == (0, 0)


def test_a_booking_follows_its_request_to_another_endpoint() -> None:
    books = Books("a", "b")
    booking = books.ledger.book(books.engine("a"), 500, 0.0)
    moved = books.ledger.move(booking, books.engine("b"), 300, 1.0)
    assert (books.load("a"), books.load("b")) == ((0, 0), (300, 1))
    assert books.ledger.move(moved, books.engine("b"), 300, 2.0) is moved
    books.ledger.release(booking)
    assert books.load("b") == (300, 1), "the old booking is over"
    books.ledger.release(moved)
    assert books.load("b") == (0, 0)


@pytest.mark.parametrize("slot_taken", [False, True])
def test_a_move_to_an_endpoint_that_has_left_burdens_nobody(slot_taken: bool) -> None:
    books = Books("a", "b")
    booking = books.ledger.book(books.engine("a"), 500, 0.0)
    gone = books.engine("b")
    books.set("a")
    if slot_taken:
        books.set("a", "c")
    moved = books.ledger.move(booking, gone, 300, 1.0)
    books.set("a", "c")
    assert books.engine("c").slot == gone.slot
    assert (books.load("a"), books.load("c")) == ((0, 0), (0, 0))
    books.changed.clear()
    books.ledger.release(moved)
    assert (books.load("c"), books.changed) == ((0, 0), [])


def test_what_ends_on_an_endpoint_that_has_left_is_not_taken_from_its_successor() -> None:
    books = Books("a")
    booking = books.ledger.book(books.engine("a"), 500, 0.0)
    books.set()
    books.set("b")
    assert books.engine("b").slot == 0
    fresh = books.ledger.book(books.engine("b"), 70, 1.0)
    books.ledger.release(booking)
    assert books.load("b") == (70, 1)
    books.ledger.release(fresh)
    assert books.load("b") == (0, 0)


def test_what_an_engine_holds_beyond_our_bookings_is_foreign() -> None:
    books = Books("a")
    endpoint = books.engine("a")
    books.ledger.book(endpoint, 10, now=1.0)
    books.ledger.correct(endpoint, EngineReport(at=2.0, running=3, waiting=2))
    load = books.ledger.load(endpoint.slot)
    assert (load.running, load.foreign) == (1, 4)
    books.ledger.correct(endpoint, EngineReport(at=3.0, running=1, waiting=None))
    assert load.foreign == 0


def test_a_report_that_is_older_than_a_booking_does_not_hide_foreign_work() -> None:
    books = Books("a")
    endpoint = books.engine("a")
    books.ledger.book(endpoint, 10, now=5.0)
    books.ledger.correct(endpoint, EngineReport(at=4.0, running=1, waiting=0))
    assert books.ledger.load(endpoint.slot).foreign == 1


def test_a_report_without_figures_changes_nothing() -> None:
    books = Books("a")
    books.changed.clear()
    books.ledger.correct(books.engine("a"), EngineReport(at=1.0))
    assert (books.changed, books.ledger.load(0).foreign) == ([], 0)


def test_an_engine_that_is_idle_for_several_reports_holds_no_old_booking() -> None:
    books = Books("a")
    endpoint = books.engine("a")
    lost = books.ledger.book(endpoint, 500, now=0.0)
    for at in (1.0, 2.0):
        books.ledger.correct(endpoint, EngineReport(at=at, running=0, waiting=0))
    books.ledger.book(endpoint, 30, now=2.5)
    assert books.load("a") == (530, 2), "two idle reports are not enough"
    books.ledger.correct(endpoint, EngineReport(at=3.0, running=0, waiting=0))
    assert books.load("a") == (30, 1), "only what is older than all three"
    books.ledger.release(lost)
    assert (books.load("a"), books.ledger.stats.reaped) == ((30, 1), 1)


def test_a_busy_engine_does_not_hide_a_booking_whose_end_was_never_told() -> None:
    books = Books("a")
    endpoint = books.engine("a")
    lost = books.ledger.book(endpoint, 500, now=0.0)
    books.ledger.prefill_done(lost)
    for at in range(1, 9):
        # One request after the other, each told of; the engine is never idle.
        running = books.ledger.book(endpoint, 10, now=at - 0.5)
        books.ledger.correct(endpoint, EngineReport(at=float(at), running=1, waiting=0))
        assert books.load("a") == (10, 2) if at < 3 else (10, 1)
        books.ledger.release(running)
    assert books.load("a") == (0, 0)
    assert (books.ledger.stats.reaped, books.ledger.load(endpoint.slot).foreign) == (1, 0)


def test_what_the_engine_has_in_any_of_its_reports_is_not_given_up() -> None:
    books = Books("a")
    endpoint = books.engine("a")
    for _ in range(3):
        books.ledger.book(endpoint, 10, now=0.0)
    for at, (running, waiting) in enumerate(((2, 1), (1, 0), (0, 0), (0, 1), (1, 0)), start=1):
        books.ledger.correct(endpoint, EngineReport(at=float(at), running=running, waiting=waiting))
        assert books.load("a")[1] == (3 if at < 4 else 1)


def test_one_busy_report_starts_the_count_anew() -> None:
    books = Books("a")
    endpoint = books.engine("a")
    books.ledger.book(endpoint, 500, now=0.0)
    for at, running in enumerate((0, 0, 1, 0, 0), start=1):
        books.ledger.correct(endpoint, EngineReport(at=float(at), running=running, waiting=0))
    assert books.load("a") == (500, 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["book", "prefill", "release", "move", "pool", "idle"]),
            st.integers(0, 99),
            st.integers(0, 5000),
        ),
        max_size=80,
    )
)
@settings(deadline=None, max_examples=80)
def test_loads_are_the_sums_of_open_bookings_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    books = Books("a", "b", "c")
    bookings: list[Booking] = []
    everybody = list(books.pool)
    for now, (what, number, tokens) in enumerate(steps):
        booking = bookings[number % len(bookings)] if bookings else None
        members = list(books.pool)
        match what:
            case "book" if members:
                endpoint, holder = members[number % len(members)], "xyz"[tokens % 3]
                bookings.append(books.ledger.book(endpoint, tokens, float(now), holder, 1 + number))
            case "prefill" if booking:
                books.ledger.prefill_done(booking)
            case "release" if booking:
                books.ledger.release(booking)
            case "move" if booking:
                bookings.append(
                    books.ledger.move(booking, everybody[number % len(everybody)], number, float(now))
                )
            case "pool":
                books.set(*(name for place, name in enumerate("abcdef") if tokens >> place & 1))
                everybody += [each for each in books.pool if each not in everybody]
            case "idle" if members:
                report = EngineReport(at=float(now), running=0, waiting=0)
                books.ledger.correct(members[number % len(members)], report)
        for endpoint in books.pool:
            mine = {each for each in bookings if each.open and each.endpoint is endpoint}
            load = books.ledger.load(endpoint.slot)
            assert load.running == len(mine)
            assert load.prefill_tokens == sum(each.prefill_tokens for each in mine)
            assert {holder: (held.prefill_tokens, held.requests) for holder, held in load.held.items()} == {
                holder: (
                    sum(each.prefill_tokens for each in mine if each.holder == holder),
                    sum(1 for each in mine if each.holder == holder),
                )
                for holder in {each.holder for each in mine}
            }
