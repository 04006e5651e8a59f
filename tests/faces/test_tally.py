"""Sums over faces: counters never fall, gauges are of those that live."""

from __future__ import annotations

from picker.extproc.server import ExtProcStats
from picker.faces.tally import Tally, counts_of
from picker.rpc import BudgetStats


def counts(streams: int, active: int, **refused: int) -> dict[str, dict[str, float | dict[str, float]]]:
    stats = ExtProcStats(streams=streams, active_streams=active)
    stats.refused.update(refused)
    return counts_of({"extproc": stats, "bodies": lambda: BudgetStats(held_bytes=active)})


def test_faces_are_added_up() -> None:
    tally = Tally()
    tally.count(0, counts(3, 1, deadline=2))
    tally.count(1, counts(4, 2, deadline=1, bad_request=1))
    extproc = tally.room("extproc")
    assert (extproc.streams, extproc.active_streams) == (7, 3)
    assert extproc.refused == {"deadline": 3, "bad_request": 1}
    assert tally.room("bodies").held_bytes == 3


def test_a_face_that_is_gone_keeps_its_counts_and_holds_nothing() -> None:
    tally = Tally()
    tally.count(0, counts(3, 1, deadline=2))
    tally.gone(0)
    tally.gone(0)
    extproc = tally.room("extproc")
    assert (extproc.streams, extproc.active_streams, extproc.refused) == (3, 0, {"deadline": 2})
    tally.count(0, counts(1, 1))
    tally.count(0, counts(2, 1, deadline=1))
    extproc = tally.room("extproc")
    assert (extproc.streams, extproc.active_streams, extproc.refused) == (5, 1, {"deadline": 3})


def test_before_the_first_report_all_is_zero() -> None:
    extproc = Tally().room("extproc")
    assert (extproc.streams, extproc.refused) == (0, {})
    assert Tally().room("tokens").estimated == {}
