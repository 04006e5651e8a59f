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
    assert max(calibration.rates.values()) > 2 * min(calibration.rates.values())
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
