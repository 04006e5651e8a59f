"""Predictions from routing: how long they live, whose they are, how many there may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys, root_key
from picker.kvcache.matching import PrefixMatch, Tier
from picker.kvcache.predicted import CombinedIndex, PredictedIndex, merge

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
) -> None:
    index.predict(slot, keys, now, ttl=ttl, capacity=capacity)


def test_a_prediction_is_matched_until_it_expires() -> None:
    index = PredictedIndex()
    predict(index, PROMPT, 0.0)
    index.expire(9.9)
    assert index.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(8)}
    index.expire(10.0)
    assert index.find_matches(PROMPT, EVERYBODY) == {}
    assert (len(index), index.stats.expired) == (0, 8)


def test_one_requests_end_does_not_take_anothers_blocks() -> None:
    index = PredictedIndex()
    predict(index, PROMPT, 0.0)
    predict(index, SHARED, 9.0)
    index.expire(10.0)
    assert index.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(4)}
    assert index.find_matches(SHARED, EVERYBODY) == {0: PrefixMatch(6)}
    index.expire(19.0)
    assert len(index) == 0


def test_a_slots_predictions_are_its_own() -> None:
    index = PredictedIndex()
    predict(index, PROMPT, 0.0, slot=3)
    predict(index, SHARED, 5.0, slot=150)
    assert index.find_matches(PROMPT, EVERYBODY) == {3: PrefixMatch(8), 150: PrefixMatch(4)}
    assert index.find_matches(PROMPT, 1 << 3) == {3: PrefixMatch(8)}
    index.expire(10.0)
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
    index.expire(3.0)
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
        index.expire(now)
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
    predicted.expire(2.0)
    assert both.find_matches(PROMPT, EVERYBODY) == {0: PrefixMatch(6), 1: PrefixMatch(0, host=1)}
