"""Which model serves a request that names another: precedence, and shares by weight."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.policy import PolicyError, load_policy
from picker.policy.rewrites import ModelRewrites, RewriteTarget, Split
from tests.policy.policies import load, text_of


def rewrites(*rules: dict[str, Any]) -> ModelRewrites:
    return load({"model_rewrites": list(rules)}).rewrites


def models(split: Split | None) -> tuple[str, ...] | None:
    return split.models if split is not None else None


def to(*names: str) -> list[dict[str, Any]]:
    return [{"model": name} for name in names]


def test_a_rule_that_names_the_model_goes_before_one_that_names_none_and_the_first_of_each_counts() -> None:
    found = rewrites(
        {"targets": to("any")},
        {"match": ["chat", "code"], "targets": to("first")},
        {"match": ["chat", "more"], "targets": to("second")},
        {"targets": to("late")},
    )
    names = ("chat", "code", "more", "other", "")
    assert [models(found.split(name)) for name in names] == [
        ("first",), ("first",), ("second",), ("any",), ("any",),
    ]  # fmt: skip
    assert rewrites({"match": ["chat"], "targets": to("x")}).split("other") is None
    assert load({"selection": {}}).rewrites.split("chat") is None


def test_later_rules_count_where_earlier_ones_say_nothing() -> None:
    ours = rewrites({"match": ["chat"], "targets": to("ours")})
    theirs = rewrites({"match": ["chat", "code"], "targets": to("theirs")}, {"targets": to("any")})
    both = ours.then(theirs)
    assert [models(both.split(name)) for name in ("chat", "code", "x")] == [("ours",), ("theirs",), ("any",)]
    assert theirs.then(ours).split("chat") == theirs.split("chat")


@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_a_draw_falls_on_the_model_whose_part_of_the_whole_it_is_in(weights: list[int], draw: float) -> None:
    names = [f"m{number}" for number in range(len(weights))]
    split = Split.of(
        RewriteTarget(model=name, weight=weight) for name, weight in zip(names, weights, strict=True)
    )
    chosen = names.index(split.choose(draw))
    point = draw * sum(weights)
    assert sum(weights[:chosen]) <= point < sum(weights[: chosen + 1])


def test_parts_are_as_the_weights_and_equal_without_any() -> None:
    random = Random(5)
    weighted = Split.of([RewriteTarget(model="a", weight=90), RewriteTarget(model="b", weight=10)])
    counts = Counter(weighted.choose(random.random()) for _ in range(10_000))
    assert abs(counts["b"] - 1000) < 150
    equal = Split.of([RewriteTarget(model="a"), RewriteTarget(model="b"), RewriteTarget(model="c")])
    assert [equal.choose(draw) for draw in (0.0, 0.34, 0.99)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"targets": []}, "must not be empty"),
        ({"match": ["a"]}, "missing"),
        (
            {"targets": [{"model": "a", "weight": 1}, {"model": "b"}]},
            "either all targets have a weight or none",
        ),
        ({"targets": [{"model": "a", "weight": 0}]}, "must be at least 1"),
        ({"targets": [{"model": "a", "weight": 1_000_001}]}, "must be at most 1000000"),
        ({"targets": [{"model": "a", "weight": 0.5}]}, "must be a whole number"),
        ({"targets": [{"model": ""}]}, ""),
        ({"targets": [{"model": "m" * 257}]}, "256"),
        ({"targets": [{"model": "a", "wieght": 1}]}, 'did you mean "weight"?'),
        ({"mach": ["a"], "targets": [{"model": "a"}]}, 'did you mean "match"?'),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_line(rule: dict[str, Any], problem: str) -> None:
    with pytest.raises(PolicyError, match=r"^policy\.yaml:\d+: ") as caught:
        load_policy(text_of({"model_rewrites": [rule]}), "policy.yaml")
    assert problem in str(caught.value)
