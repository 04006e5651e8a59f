"""Shares over time against what the weights entitle to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.telemetry import ClassStats
from picker.telemetry.shares import Share, ShareHistory


def stats(label: str, quantum: int, cost: int, waiting: int = 1) -> ClassStats:
    return ClassStats(label, quantum, waiting_requests=waiting, dispatched_cost=cost)


def test_no_work_no_shares() -> None:
    history = ShareHistory()
    assert history.over(60, 0.0) == {}
    history.sample([stats("a", 1, 5)], 0.0)
    history.sample([stats("a", 1, 5)], 1.0)
    assert history.over(60, 1.0) == {}


def test_a_class_without_work_is_entitled_to_nothing() -> None:
    history = ShareHistory()
    history.sample([stats("a", 3, 0), stats("b", 1, 0, waiting=0)], 0.0)
    history.sample([stats("a", 3, 100), stats("b", 1, 0, waiting=0)], 1.0)
    assert history.over(60, 1.0) == {"a": Share(1.0, 1.0), "b": Share(0.0, 0.0)}


def test_entitlement_follows_who_had_work_when() -> None:
    history = ShareHistory()
    history.sample([stats("a", 1, 0), stats("b", 1, 0, waiting=0)], 0.0)
    history.sample([stats("a", 1, 100), stats("b", 1, 0, waiting=0)], 1.0)
    history.sample([stats("a", 1, 150), stats("b", 1, 50)], 2.0)
    shares = history.over(60, 2.0)
    assert (shares["a"].share, shares["a"].entitlement) == (0.75, 0.75)


def test_old_samples_do_not_count_in_a_short_window() -> None:
    history = ShareHistory()
    for at, cost_a, cost_b in ((0.0, 0, 0), (100.0, 1000, 0), (101.0, 1000, 10)):
        history.sample([stats("a", 1, cost_a), stats("b", 1, cost_b)], at)
    assert history.over(5, 101.0)["b"].share == 1.0


def test_a_class_that_comes_with_a_new_policy_is_counted_from_then() -> None:
    history = ShareHistory()
    history.sample([stats("a", 1, 10)], 0.0)
    history.sample([stats("a", 1, 20), stats("b", 1, 10)], 1.0)
    assert history.over(60, 1.0)["b"].share == 0.5


def test_a_counter_that_starts_again_is_no_negative_work() -> None:
    history = ShareHistory()
    history.sample([stats("a", 1, 1000), stats("b", 1, 0)], 0.0)
    history.sample([stats("a", 1, 0), stats("b", 1, 10)], 1.0)
    assert history.over(60, 1.0)["a"].share == 0.0


def test_series_is_oldest_first_and_as_long_as_there_are_samples() -> None:
    history = ShareHistory()
    for second in range(11):
        history.sample([stats("a", 1, second), stats("b", 1, 2 * second)], float(second))
    series = history.series(points=3, step=2)
    assert [at for at, _ in series] == [6.0, 8.0, 10.0]
    assert series[0][1]["b"].share == pytest.approx(2 / 3)
    assert len(history.series(points=100, step=2)) == 5


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=3, max_size=3), min_size=2))
def test_shares_and_entitlements_each_sum_to_one(steps: list[list[tuple[int, bool]]]) -> None:
    history = ShareHistory(len(steps))
    cost = [0, 0, 0]
    for second, step in enumerate(steps):
        cost = [total + work for total, (work, _) in zip(cost, step, strict=True)]
        history.sample(
            [stats("abc"[i], i + 1, cost[i], waiting=int(waits)) for i, (_, waits) in enumerate(step)],
            float(second),
        )
    shares = history.over(1e9, float(len(steps)))
    if shares:
        assert sum(share.share for share in shares.values()) == pytest.approx(1)
        assert sum(share.entitlement for share in shares.values()) == pytest.approx(1)
