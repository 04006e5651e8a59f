"""Rates that are learned from first-byte times, and inter-token times from what engines report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.pool.calibration import Calibration, InterTokenTimes
from picker.pool.endpoint import EndpointSpec, EngineReport
from picker.pool.pool import Pool


def test_nothing_is_known_before_there_are_enough_samples() -> None:
    calibration = Calibration(min_samples=3)
    for _ in range(2):
        calibration.observe(0, 1000, 1.0)
    assert calibration.rate(0) is None
    calibration.observe(0, 1000, 1.0)
    assert calibration.rate(0) == 1000.0


def test_the_median_shrugs_off_stalls_and_lucky_hits() -> None:
    calibration = Calibration(min_samples=3)
    for seconds in (1.0, 1.0, 30.0, 1.0, 0.001, 1.0, 25.0):
        calibration.observe(0, 1000, seconds)
    assert calibration.rate(0) == 1000.0


def test_small_prompts_and_broken_clocks_say_nothing() -> None:
    calibration = Calibration(min_samples=1)
    calibration.observe(0, 10, 1.0)
    calibration.observe(0, 1000, 0.0)
    calibration.observe(0, 1000, -1.0)
    assert calibration.rate(0) is None


def test_an_unknown_endpoint_is_taken_for_a_typical_one() -> None:
    calibration = Calibration(min_samples=1)
    for slot, rate in enumerate((500.0, 1000.0, 4000.0)):
        calibration.observe(slot, round(rate), 1.0)
    assert calibration.rate(9) == 1000.0


def test_an_endpoint_that_takes_longer_for_the_same_is_slow() -> None:
    calibration = Calibration(min_samples=3)
    for _ in range(3):
        for slot, seconds in enumerate((1.0, 1.0, 2.0, 0.4)):
            calibration.observe(slot, 4096, seconds)
    assert calibration.slowness == pytest.approx({2: 2.0, 3: 0.4})


def test_who_is_sent_the_small_prompts_is_not_slow_for_that() -> None:
    """Each answer takes 0.1 s on top, so that small prompts go at a third of the rate of large ones."""
    calibration = Calibration(min_samples=4)
    for step in range(40):
        for slot in range(4):
            tokens = (512, 8192)[slot % 2] if step % 8 else (8192, 512)[slot % 2]
            calibration.observe(slot, tokens, 0.1 + tokens / 12_000)
    assert max(calibration.rates.known.values()) > 2 * min(calibration.rates.known.values())
    assert calibration.slowness == {}


def test_what_is_within_the_noise_is_typical() -> None:
    calibration = Calibration(min_samples=1, tolerance=0.25)
    for slot, seconds in enumerate((1.0, 1.0, 1.2, 0.85)):
        calibration.observe(slot, 1000, seconds)
    assert calibration.slowness == {}


def test_an_endpoint_that_recovers_is_slow_no_more() -> None:
    calibration = Calibration(window=4, min_samples=2)
    for seconds in (3.0, 3.0, 3.0, 3.0):
        for slot in (1, 2):
            calibration.observe(slot, 1000, 1.0)
        calibration.observe(0, 1000, seconds)
    assert set(calibration.slowness) == {0}
    for _ in range(4):
        calibration.observe(0, 1000, 1.0)
    assert calibration.slowness == {}


def test_old_samples_are_forgotten() -> None:
    calibration = Calibration(window=4, min_samples=1)
    for seconds in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0):
        calibration.observe(0, 1000, seconds)
    assert calibration.rate(0) == 500.0


def test_a_slot_that_is_given_away_starts_clean() -> None:
    pool, calibration = Pool(), Calibration(min_samples=1)
    pool.subscribe(calibration.pool_changed)
    pool.replace([EndpointSpec(name, name, "10.0.0.1", 8000) for name in "ab"])
    calibration.observe(0, 1000, 1.0)
    calibration.observe(1, 3000, 1.0)
    pool.replace([EndpointSpec("b", "b", "10.0.0.1", 8000)])
    assert calibration.rate(0) == 3000.0, "only what is typical of the others is known of it"
    assert calibration.slowness == {}
    pool.replace([])
    assert calibration.rate(0) is None


class Engine:
    """One engine's counters, as its reports tell them."""

    def __init__(self, slot: int = 0) -> None:
        self.slot = slot
        self.seconds = 0.0
        self.tokens = 0

    def decode(self, times: InterTokenTimes, tokens: int, gap: float) -> None:
        """So many tokens, `gap` seconds apart, then a report."""
        self.tokens += tokens
        self.seconds += tokens * gap
        self.report(times)

    def report(self, times: InterTokenTimes) -> None:
        times.observe(
            self.slot,
            EngineReport(at=0.0, inter_token_seconds=self.seconds, inter_tokens=float(self.tokens)),
        )


def test_the_inter_token_time_is_the_median_of_what_comes_between_reports() -> None:
    times, engine = InterTokenTimes(min_samples=3), Engine()
    engine.decode(times, 10**6, 9.0)
    for gap in (0.02, 0.02):
        engine.decode(times, 100, gap)
    assert times.known == {}, "what was before the first report is no sample"
    engine.decode(times, 100, 5.0)
    assert times.known == pytest.approx({0: 0.02})


def test_few_tokens_are_put_together_until_they_make_a_sample() -> None:
    times, engine = InterTokenTimes(min_samples=1, min_tokens=32), Engine()
    engine.report(times)
    for gap in (0.01, 0.02, 0.03):
        engine.decode(times, 10, gap)
    engine.report(times)
    assert times.known == {}
    engine.decode(times, 10, 0.04)
    assert times.known == pytest.approx({0: 0.025})


def test_an_engine_that_starts_anew_gives_no_sample_of_the_time_between() -> None:
    times, engine = InterTokenTimes(min_samples=1), Engine()
    engine.report(times)
    engine.decode(times, 1000, 0.02)
    engine.seconds, engine.tokens = 500.0, 900
    engine.report(times)
    assert times.known == pytest.approx({0: 0.02})
    engine.decode(times, 100, 0.03)
    assert times.known == pytest.approx({0: 0.025})


def test_a_report_without_inter_token_times_changes_nothing() -> None:
    times, engine = InterTokenTimes(min_samples=1), Engine()
    engine.report(times)
    times.observe(0, EngineReport(at=0.0))
    times.observe(0, EngineReport(at=0.0, inter_token_seconds=1.0))
    engine.decode(times, 100, 0.02)
    assert times.known == pytest.approx({0: 0.02})


def test_the_next_endpoint_in_a_slot_has_an_inter_token_time_of_its_own() -> None:
    pool, calibration = Pool(), Calibration()
    pool.subscribe(calibration.pool_changed)
    times = calibration.inter_token
    pool.replace([EndpointSpec("a", "a", "10.0.0.1", 1)])
    first, second = Engine(), Engine()
    for _ in range(20):
        first.decode(times, 100, 0.02)
    pool.replace([EndpointSpec("b", "b", "10.0.0.2", 1)])
    assert times.known == {}
    for _ in range(20):
        second.decode(times, 100, 0.05)
    assert times.known == pytest.approx({0: 0.05})


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0.001, 1.0)), max_size=60), st.integers(1, 100))
def test_an_inter_token_time_is_one_that_was_seen(history: list[tuple[int, float]], min_tokens: int) -> None:
    times, engine = InterTokenTimes(window=4, min_samples=2, min_tokens=min_tokens), Engine()
    engine.report(times)
    for tokens, gap in history:
        engine.decode(times, tokens, gap)
    seen = [gap for tokens, gap in history if tokens]
    assert all(0.99 * min(seen) <= known <= 1.01 * max(seen) for known in times.known.values())
    assert bool(times.known) <= (sum(tokens for tokens, _ in history) >= 2 * min_tokens)
