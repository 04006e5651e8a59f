"""Drift between predicted and reported cached tokens, and what is said to be its cause."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from picker.kvcache.accuracy import AccuracyTracker, Cause, Verdict


def feed(
    tracker: AccuracyTracker, pairs: list[tuple[int, int]], *, model: str = "m", block_size: int = 16
) -> list[Verdict]:
    said = [
        tracker.observe(model, predicted=predicted, reported=reported, block_size=block_size)
        for predicted, reported in pairs
    ]
    return [verdict for verdict in said if verdict]


def prompts(count: int = 64) -> list[int]:
    """Cached lengths in tokens, as they come."""
    source = random.Random(5)
    return [source.randrange(64, 4000) for _ in range(count)]


def whole(length: int, block: int) -> int:
    return length // block * block


CASES: dict[str, tuple[Cause, Callable[[int], tuple[int, int]]]] = {
    "equal": (Cause.NONE, lambda n: (whole(n, 16), whole(n, 16))),
    "a few blocks off": (Cause.NONE, lambda n: (whole(n, 16) + 16 * (n % 3), whole(n, 16))),
    "wrong template": (Cause.TOKENS, lambda n: (0, whole(n, 16))),
    "engine's blocks are larger": (Cause.BLOCK_SIZE, lambda n: (whole(n, 16), whole(n, 64))),
    "engine's blocks are smaller": (Cause.BLOCK_SIZE, lambda n: (whole(n, 16), whole(n, 8))),
    "prefix cache off": (Cause.NO_REUSE, lambda n: (whole(n, 16), 0)),
    "missed removals": (Cause.OVER, lambda n: (whole(n, 16), whole(n, 16) if n % 2 else 0)),
    "missed stores": (Cause.UNDER, lambda n: (whole(n, 16) if n % 2 else 0, whole(n, 16))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_likely_cause_is_named(name: str) -> None:
    cause, response = CASES[name]
    tracker = AccuracyTracker()
    said = feed(tracker, [response(length) for length in prompts()])
    verdict = tracker.verdict("m")
    assert verdict is not None
    assert verdict.cause is cause
    assert [verdict.cause for verdict in said] == ([] if cause is Cause.NONE else [cause])
    assert tracker.stats.verdicts[cause] == len(said)


def test_the_explanation_names_the_size() -> None:
    tracker = AccuracyTracker()
    (said,) = feed(tracker, [(whole(n, 16), whole(n, 64)) for n in prompts()])
    assert "64" in said.explanation
    assert "16" in said.explanation


def test_the_same_prompt_over_and_over_does_not_tell_the_block_size() -> None:
    tracker = AccuracyTracker()
    assert feed(tracker, [(1024, 1024)] * 100) == []


def test_nothing_is_said_of_a_few_responses_or_of_uncached_ones() -> None:
    tracker = AccuracyTracker(min_samples=16)
    assert feed(tracker, [(0, 160)] * 15 + [(0, 0)] * 500) == []
    assert tracker.verdict("m") is None
    assert [verdict.cause for verdict in feed(tracker, [(0, 160)])] == [Cause.TOKENS]


def test_a_model_that_recovers_is_said_to_agree_again() -> None:
    tracker = AccuracyTracker(window=32, min_samples=16)
    good = [(whole(n, 16), whole(n, 16)) for n in prompts()]
    said = feed(tracker, [(0, reported) for _predicted, reported in good[:20]] + good)
    assert said[0].cause is Cause.TOKENS
    assert said[-1].cause is Cause.NONE


def test_models_are_told_apart_and_bounded() -> None:
    tracker = AccuracyTracker(max_models=2)
    feed(tracker, [(0, 160)] * 16, model="bad")
    feed(tracker, [(160, 160)] * 16, model="good")
    assert [tracker.verdict(model).cause for model in ("bad", "good")] == [Cause.TOKENS, Cause.NONE]  # type: ignore[union-attr]
    feed(tracker, [(160, 160)] * 16, model="new")
    assert tracker.verdict("bad") is None
    assert tracker.verdict("good") is not None


def test_the_sums_count_every_response() -> None:
    tracker = AccuracyTracker()
    feed(tracker, [(32, 16), (0, 0), (16, 48)])
    stats = tracker.stats
    assert (stats.samples, stats.predicted_tokens, stats.reported_tokens, stats.absolute_error) == (
        3,
        48,
        64,
        48,
    )
