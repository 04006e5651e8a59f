"""Rates that are learned from first-byte times."""

from __future__ import annotations

import pytest

from picker.pool.calibration import Calibration
from picker.pool.endpoint import EndpointSpec
from picker.pool.pool import Pool


def test_nothing_is_known_before_there_are_enough_samples() -> None:
    calibration = Calibration(min_samples=3)
    for _ in range(2):
        calibration.observe(0, 1000, 1.0)
    assert (calibration.rate(0), calibration.relative_speed(0)) == (None, 1.0)
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
    speeds = [calibration.relative_speed(slot) for slot in (0, 1, 2, 9)]
    assert speeds == pytest.approx([0.5, 1.0, 4.0, 1.0])


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
    pool.replace([])
    assert calibration.rate(0) is None
