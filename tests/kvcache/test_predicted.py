"""Predictions from routing: how long they live, whose they are, how many there may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys, root_key
from picker.kvcache.matching import PrefixMatch, Tier
from picker.kvcache.predicted import CombinedIndex, PredictedIndex, Prediction, merge

EVERYBODY = (1 << 200) - 1
PROMPT = block_keys(range(8), 1)
SHARED = block_keys([0, 1, 2, 3, 90, 91], 1)  # the first four blocks of PROMPT, then its own


def predict(
    index: PredictedIndex,
    keys: list[int],
    now: float,
    *,
    slot: int = 0,
    ttl: float = 10.0,
    capacity: int = 100,
) -> Prediction:
    return index.predict(slot, keys, now, ttl=ttl, capacity=capacity)


def test_a_prediction_is_matched_until_it_expires() -> None:
    index = PredictedIndex()
    predict(index, PROMPT, 0.0)
    index.sweep(9.9)
    assert index.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(8)}
    index.sweep(10.0)
    assert index.find_matches(PROMPT, EVERYBODY) == {}
    assert (len(index), index.stats.expired) == (0, 8)


def test_one_requests_end_does_not_take_anothers_blocks() -> None:
    index = PredictedIndex()
    predict(index, PROMPT, 0.0)
    predict(index, SHARED, 9.0)
    index.sweep(10.0)
    assert index.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(4)}
    assert index.find_matches(SHARED, EVERYBODY) == {0: PrefixMatch(6)}
    index.sweep(19.0)
    assert len(index) == 0


def test_a_slots_predictions_are_its_own() -> None:
    index = PredictedIndex()
    predict(index, PROMPT, 0.0, slot=3)
    predict(index, SHARED, 5.0, slot=150)
    assert index.find_matches(PROMPT, EVERYBODY) == {3: PrefixMatch(8), 150: PrefixMatch(4)}
    assert index.find_matches(PROMPT, 1 << 3) == {3: PrefixMatch(8)}
    index.sweep(10.0)
    assert index.find_matches(PROMPT, EVERYBODY) == {150: PrefixMatch(4)}
    index.drop(150)
    assert len(index) == 0


def test_an_endpoint_is_not_predicted_to_hold_more_than_it_can() -> None:
    """The least recently predicted goes first, and a prompt's tail before its head."""
    index = PredictedIndex()
    predict(index, PROMPT, 0.0, capacity=10)
    other = block_keys(range(50, 55), 1)
    predict(index, other, 1.0, capacity=10)
    assert index.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(5)}
    assert index.find_matches(other, EVERYBODY) == {0: PrefixMatch(5)}
    assert (index.blocks_of(0), index.stats.evicted) == (10, 3)


def test_a_prompt_larger_than_the_endpoint_is_predicted_by_its_head() -> None:
    index = PredictedIndex()
    predict(index, PROMPT, 0.0, capacity=3)
    assert index.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(3)}


def test_a_shorter_life_holds_for_what_was_predicted_before() -> None:
    """When an endpoint's events begin to come, old guesses have to go as fast as new ones."""
    index = PredictedIndex()
    predict(index, PROMPT, 0.0, ttl=120.0)
    predict(index, block_keys([70], 1), 1.0, ttl=2.0)
    index.sweep(3.0)
    assert len(index) == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 2),
            st.sampled_from([PROMPT, SHARED, PROMPT[:2]]),
            st.sampled_from([2, 5]),
        ),
        max_size=30,
    )
)
def test_a_block_lives_exactly_as_long_as_its_latest_prediction(
    steps: list[tuple[int, int, list[int], int]],
) -> None:
    """Against a plain map; a shorter life cuts the slot's earlier ones."""
    index, model, now = PredictedIndex(), dict[tuple[int, int], float](), 0.0
    for pause, slot, keys, ttl in steps:
        now += pause
        predict(index, keys, now, slot=slot, ttl=ttl)
        model = {place: min(end, now + ttl) if place[0] == slot else end for place, end in model.items()}
        model |= {(slot, key): now + ttl for key in keys}
        index.sweep(now)
        model = {place: end for place, end in model.items() if end > now}
        for slot in range(3):
            for keys in (PROMPT, SHARED):
                depth = next((n for n, key in enumerate(keys) if (slot, key) not in model), len(keys))
                match = index.find_matches(keys, 1 << slot).get(slot)
                assert (match.blocks if match else 0) == depth
            assert index.blocks_of(slot) == sum(place[0] == slot for place in model)


def test_of_two_matches_the_one_worth_more_counts() -> None:
    some = {0: PrefixMatch(3), 1: PrefixMatch(0, host=4), 2: PrefixMatch(1)}
    others = {0: PrefixMatch(2), 1: PrefixMatch(4), 3: PrefixMatch(5)}
    assert merge(some, others) == {0: PrefixMatch(3), 1: PrefixMatch(4), 2: PrefixMatch(1), 3: PrefixMatch(5)}
    assert some[1] == PrefixMatch(0, host=4)


def test_predictions_are_the_bridge_until_the_events_come() -> None:
    reported, predicted = KvIndex(), PredictedIndex()
    both = CombinedIndex(reported, predicted)
    predict(predicted, PROMPT, 0.0, ttl=2.0)
    assert both.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(8)}
    reported.add(0, PROMPT[:6], root_key(1, None))
    reported.add(1, PROMPT[:1], root_key(1, None), Tier.HOST)
    predicted.sweep(2.0)
    assert both.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(6), 1: PrefixMatch(0, host=1)}


def test_a_request_that_never_arrived_takes_its_prediction_back() -> None:
    index = PredictedIndex()
    refused = predict(index, PROMPT, 0.0)
    index.retract(refused)
    assert index.find_matches(PROMPT, EVERYBODY) == {}
    assert (len(index), index.blocks_of(0), index.stats.retracted) == (0, 0, 8)
    index.retract(refused)
    predict(index, PROMPT, 1.0)
    index.retract(refused)
    assert index.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(8)}


@pytest.mark.parametrize("confirmed", [True, False], ids=["served", "under way"])
def test_a_retraction_leaves_what_others_predicted_before_and_after(confirmed: bool) -> None:
    index = PredictedIndex()
    older = predict(index, SHARED, 0.0)
    refused = predict(index, PROMPT, 1.0)
    predict(index, PROMPT[:6], 2.0)
    if confirmed:
        index.confirm(older)
    index.retract(refused)
    assert index.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(6)}
    assert index.find_matches(SHARED, EVERYBODY) == {0: PrefixMatch(6)}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_an_endpoint_that_refuses_everybody_is_cold_in_the_end(order: list[int]) -> None:
    index = PredictedIndex()
    refused = [predict(index, keys, float(now)) for now, keys in enumerate([SHARED, PROMPT, PROMPT[:2]])]
    for number in order:
        index.retract(refused[number])
    assert len(index) == 0


def test_a_thousand_refusals_on_top_of_each_other() -> None:
    index = PredictedIndex()
    refused = [predict(index, PROMPT, float(now), ttl=1e6) for now in range(2000)]
    for prediction in refused[1:]:
        index.retract(prediction)
    assert index.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(8)}
    index.retract(refused[0])
    assert len(index) == 0


def test_predictions_that_are_renewed_for_ever_take_no_more_room() -> None:
    """What newer predictions have taken over is forgotten in the older ones long before they expire."""
    index = PredictedIndex()
    keys = block_keys(range(100), 1)
    predictions = []
    for now in range(1000):
        predictions.append(predict(index, keys, float(now), ttl=1e6))
        index.confirm(predictions[-1])
    assert sum(len(each.keys) for each in predictions) < 10_000
    assert index.find_matches(keys, EVERYBODY) == {0: PrefixMatch(100)}


@dataclass
class Claim:
    """A prediction as the model sees it."""

    slot: int
    keys: list[int]
    expiry: float
    prediction: Prediction
    retracted: bool = False


ACTS = st.one_of(
    st.tuples(st.just("predict"), st.integers(0, 1), st.sampled_from([PROMPT, SHARED, PROMPT[:2]])),
    st.tuples(st.sampled_from(["confirm", "retract", "retract"]), st.integers(0, 40), st.none()),
    st.tuples(st.just("drop"), st.integers(0, 1), st.none()),
    st.tuples(st.just("sweep"), st.integers(0, 6), st.none()),
    st.tuples(st.just("wait"), st.integers(1, 4), st.none()),
)


@given(st.lists(ACTS, max_size=40))
def test_what_is_matched_has_a_reason_and_what_has_a_reason_is_matched(
    acts: list[tuple[str, int, list[int] | None]],
) -> None:
    """With drops that fade, and requests that arrive or not in any order. A retraction that comes after the
    prediction has expired comes too late to matter.
    """
    index, now = PredictedIndex(on_fading=lambda: None), 0.0
    claims: list[Claim] = []
    for act, number, keys in acts:
        if act == "predict" and keys is not None:
            prediction = predict(index, keys, now, slot=number, ttl=5.0)
            claims.append(Claim(number, keys, now + 5.0, prediction))
        elif act == "drop":
            index.drop(number)
            claims = [claim for claim in claims if claim.slot != number]
        elif act == "sweep":
            index.sweep(-math.inf, number)
        elif act == "wait":
            now += number
            while index.sweep(now, 2):
                pass
        elif claims:
            claim = claims[number % len(claims)]
            if act == "confirm" and not claim.retracted:
                index.confirm(claim.prediction)
            elif act == "retract" and not claim.prediction.confirmed:
                index.retract(claim.prediction)
                claim.retracted |= claim.expiry > now
        present = set()
        for slot in range(2):
            own = [claim for claim in claims if claim.slot == slot]
            sure = {key for claim in own if not claim.retracted and claim.expiry > now for key in claim.keys}
            unexpired = {key for claim in own if claim.expiry > now for key in claim.keys}
            wanted = {key for claim in own if not claim.retracted for key in claim.keys}
            for chain in (PROMPT, SHARED):
                match = index.find_matches(chain, 1 << slot).get(slot)
                matched = chain[: match.blocks if match else 0]
                assert len(list(takewhile(sure.__contains__, chain))) <= len(matched)
                assert unexpired.issuperset(matched)
                assert wanted.issuperset(matched)
                present |= set(matched)
        assert len(index) >= len(present)
    index.drop(0)
    index.drop(1)
    while index.sweep(-math.inf, 3):
        pass
    assert len(index) == 0
