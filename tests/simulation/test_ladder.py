"""The model against llm-d's published figures: the reason to believe the simulator at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from picker.simulation.ladder import PUBLISHED, STAGES, climb, picker_named
from picker.simulation.replay import Picker, Pod


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_reproduces_the_published_ladder(name: str) -> None:
    def make(pods: Sequence[Pod]) -> Picker:
        return picker_named(name, pods)

    published = PUBLISHED[name]
    results = {stage.rate: stage for stage in climb(make)}
    average = sum(stage.output_rate for stage in results.values()) / len(results)
    assert average == pytest.approx(published.average, rel=0.15)
    assert results[20.0].output_rate == pytest.approx(published.at_rate_20, rel=0.15)
    if name == "round-robin":
        # The knee lies between 15 and 20 requests a second.
        assert results[15.0].ttft_mean < 1.5
        assert results[20.0].ttft_mean > 10.0
    else:
        below = [results[rate] for rate, _ in STAGES if rate <= 35.0]
        assert all(stage.ttft_mean < 2 * published.ttft_mean for stage in below)
        assert all(stage.ttft_mean > published.ttft_mean / 2 for stage in below)


def test_the_knee_of_round_robin_comes_before_that_of_the_blend() -> None:
    """The short form of the above: one stage past the first knee and before the second."""
    outcome = {}
    for name in PUBLISHED:

        def make(pods: Sequence[Pod], name: str = name) -> Picker:
            return picker_named(name, pods)

        (stage,) = climb(make, stages=[(20.0, 38.0)])
        assert stage.output_rate == pytest.approx(PUBLISHED[name].at_rate_20, rel=0.15)
        outcome[name] = stage.ttft_mean
    assert outcome["round-robin"] > 10.0
    assert outcome["llmd-blend"] < 0.5
