"""Requests that go on under another model's name."""

from __future__ import annotations

from random import Random

import pytest

from picker.policy.rewrites import ModelRewrites, Split
from picker.requests import BadRequest, InferenceRequest, Rewriting, Route, places_of_model

RULES = ModelRewrites({"chat": Split(("v1", "v2"), (3, 4)), "same": Split(("same",), (1,))})


def request(model: str | None) -> InferenceRequest:
    return InferenceRequest(Route.CHAT, model=model, max_tokens=3)


def test_only_the_model_changes_and_only_where_a_rule_says_so() -> None:
    rewriting = Rewriting(RULES, Random(1))
    for model in ("other", None, "same"):
        assert rewriting.apply(request(model)) == request(model)
    assert rewriting.apply(request("chat")) in (request("v1"), request("v2"))


def test_who_has_no_model_is_left_alone_even_by_a_rule_for_all() -> None:
    rewriting = Rewriting(ModelRewrites(others=Split(("v1",), (1,))))
    assert rewriting.apply(request(None)).model is None
    assert rewriting.apply(request("")).model == "v1"


def test_the_same_seed_draws_the_same_and_what_is_counted_has_the_names_of_rules() -> None:
    one, other = (Rewriting(RULES, Random(7)) for _ in range(2))
    drawn = [one.apply(request("chat")).model for _ in range(400)]
    assert drawn == [other.apply(request("chat")).model for _ in range(400)]
    assert 60 < drawn.count("v2") < 140
    for number in range(100):
        one.apply(request(f"client's own {number}"))
    assert one.stats.requests == {"v1": drawn.count("v1"), "v2": drawn.count("v2")}


def test_a_body_with_a_coding_is_refused_and_so_is_a_key_that_is_repeated_without_end() -> None:
    assert places_of_model(b'{"model":"a"}', is_coded=False) == ((9, 12),)
    with pytest.raises(BadRequest) as coded:
        places_of_model(b"\x1f\x8b", is_coded=True)
    assert (coded.value.status, coded.value.param) == (415, "content-encoding")
    repeated = b"{" + b",".join([b'"model":"a"'] * 17) + b"}"
    with pytest.raises(BadRequest) as often:
        places_of_model(repeated, is_coded=False)
    assert (often.value.status, often.value.param) == (400, "model")
    assert len(places_of_model(repeated.replace(b',"model":"a"', b"", 1), is_coded=False)) == 16
