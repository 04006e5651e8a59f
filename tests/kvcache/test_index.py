"""The KV index against a plain model, and its bounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys, root_key
from picker.kvcache.matching import PrefixMatch, Tier

ROOT = root_key(1, None)
EVERYBODY = (1 << 200) - 1

# A small tree of prompts: chains that share their first blocks and part.
CHAINS = [block_keys(ids, 1) for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 9, 8], [1, 7, 7], [6])]
PARENTS = {key: parent for keys in CHAINS for parent, key in zip([ROOT, *keys], keys, strict=False)}


class PlainIndex:
    """What the index is to mean: a set of (slot, key, tier)."""

    def __init__(self) -> None:
        self.held: set[tuple[int, int, Tier]] = set()

    def find_matches(self, keys: Sequence[int], slots: set[int]) -> dict[int, PrefixMatch]:
        matches = {}
        for slot in slots:
            counts = [0, 0, 0]
            for key in keys:
                tiers = [tier for tier in Tier if (slot, key, tier) in self.held]
                if not tiers:
                    break
                counts[min(tiers)] += 1
            if any(counts):
                matches[slot] = PrefixMatch(*counts)
        return matches


def leftovers(index: KvIndex) -> list[str]:
    """Names of the index's containers that still hold something: an empty index must not grow in secret."""
    containers = {
        name: value for name, value in vars(index).items() if isinstance(value, dict | tuple | list)
    }
    return [name for name, value in containers.items() if value and value != ({}, {}, {})]


SLOTS = st.sampled_from([0, 1, 5, 64, 130])
PIECES = st.builds(
    lambda keys, start, length: keys[start : start + length],
    st.sampled_from(CHAINS),
    st.integers(0, 4),
    st.integers(1, 5),
).filter(bool)
STEPS = st.one_of(
    st.tuples(st.just("add"), SLOTS, PIECES, st.sampled_from(Tier)),
    st.tuples(st.just("remove"), SLOTS, PIECES, st.sampled_from(Tier)),
    st.tuples(st.sampled_from(["clear", "drop"]), SLOTS, st.just([]), st.just(Tier.DEVICE)),
    st.tuples(st.just("sweep"), st.integers(0, 4), st.just([]), st.just(Tier.DEVICE)),
)


@pytest.mark.parametrize("fades", [False, True], ids=["at once", "bit by bit"])
@given(st.lists(STEPS, max_size=40), st.sets(SLOTS))
def test_it_equals_a_set_of_what_each_slot_holds(
    fades: bool, steps: list[tuple[str, int, list[int], Tier]], asked: set[int]
) -> None:
    """Also while blocks fade that were dropped: nobody can tell that they are still there."""
    model, told = PlainIndex(), list[None]()
    index = KvIndex(on_fading=(lambda: told.append(None)) if fades else None)
    mask = sum(1 << slot for slot in asked)
    for step, slot, keys, tier in steps:
        if step == "add":
            index.add(slot, keys, PARENTS[keys[0]], tier)
            model.held |= {(slot, key, tier) for key in keys}
        elif step == "remove":
            index.remove(slot, keys, tier)
            model.held -= {(slot, key, tier) for key in keys}
        elif step == "sweep":
            index.sweep(slot)
        else:
            index.clear(slot) if step == "clear" else index.drop(slot)
            model.held = {entry for entry in model.held if entry[0] != slot}
        present = {key for _slot, key, _tier in model.held}
        assert len(index) == len(present)
        assert index.blocks_of(slot) == len({key for holder, key, _tier in model.held if holder == slot})
        for key, parent in PARENTS.items():
            assert (key in index) == (key in present)
            assert index.parent(key) == (parent if key in present else None)
            assert index.holds(slot, key, tier) == ((slot, key, tier) in model.held)
        for chain in CHAINS:
            assert index.find_matches(chain, mask) == model.find_matches(chain, asked)
    for slot in {slot for slot, _key, _tier in model.held}:
        index.drop(slot)
    if fades:
        while index.sweep(1):
            assert told
    assert not leftovers(index)


@given(
    st.lists(
        st.tuples(SLOTS, st.sampled_from(CHAINS), st.integers(1, 5), st.sampled_from([None, 0, 2])),
        max_size=20,
    ),
    st.integers(1, 9),
)
def test_a_bounded_index_only_forgets_tails(
    stores: list[tuple[int, list[int], int, int | None]], bound: int
) -> None:
    """What fades counts towards the bound and goes first; with a number, the slot is dropped and partly swept."""
    index, model = KvIndex(max_blocks=bound, on_fading=lambda: None), PlainIndex()
    for slot, keys, length, swept in stores:
        if swept is not None:
            index.drop(slot)
            index.sweep(swept)
            model.held = {entry for entry in model.held if entry[0] != slot}
        index.add(slot, keys[:length], ROOT)
        model.held |= {(slot, key, Tier.DEVICE) for key in keys[:length]}
        assert len(index) <= bound
    for _slot, keys, length, _swept in stores:
        kept = [key in index for key in keys[:length]]
        assert kept == sorted(kept, reverse=True)
    for keys in CHAINS:
        truth = model.find_matches(keys, {0, 1, 5, 64, 130})
        for slot, match in index.find_matches(keys, EVERYBODY).items():
            assert match.blocks <= truth[slot].blocks
    for slot in (0, 1, 5, 64, 130):
        index.drop(slot)
    while index.sweep(3):
        pass
    assert not leftovers(index)


def test_the_oldest_chain_goes_first_and_from_its_end() -> None:
    old, new = block_keys(range(100, 104), 1), block_keys(range(200, 204), 1)
    index = KvIndex(max_blocks=6)
    index.add(0, old, ROOT)
    index.add(1, new, ROOT)
    assert index.find_matches(old, EVERYBODY) == {0: PrefixMatch(2)}
    assert index.find_matches(new, EVERYBODY) == {1: PrefixMatch(4)}
    assert index.stats.evicted == 2
    assert index.blocks_of(0) == 2


def test_a_chain_longer_than_the_index_keeps_its_start() -> None:
    keys = block_keys(range(10), 1)
    index = KvIndex(max_blocks=4)
    index.add(0, keys, ROOT)
    assert index.find_matches(keys, 1) == {0: PrefixMatch(4)}


def test_a_block_may_have_any_number_of_holders() -> None:
    keys = block_keys(range(3), 1)
    index = KvIndex()
    for slot in range(200):
        index.add(slot, keys[: 1 + slot % 3], ROOT)
    matches = index.find_matches(keys, EVERYBODY)
    assert matches == {slot: PrefixMatch(1 + slot % 3) for slot in range(200)}


def test_a_block_counts_once_at_its_best_tier() -> None:
    keys = block_keys(range(6), 1)
    index = KvIndex()
    index.add(0, keys, ROOT, Tier.DISK)
    index.add(0, keys[:4], ROOT, Tier.HOST)
    index.add(0, keys[:1], ROOT)
    index.add(0, keys[2:3], keys[1])
    match = index.find_matches(keys, 1)[0]
    assert match == PrefixMatch(device=2, host=2, disk=2)
    assert (match.blocks, match.weighted) == (6, 2 + 2 * 0.75 + 2 * 0.25)


def test_blocks_behind_a_gap_do_not_count() -> None:
    keys = block_keys(range(4), 1)
    index = KvIndex()
    index.add(0, keys[:1], ROOT)
    index.add(1, keys[1:2], keys[0])
    index.add(0, keys[2:], keys[1])
    assert index.find_matches(keys, EVERYBODY) == {0: PrefixMatch(1)}


def test_looking_stops_at_the_first_block_that_nobody_asked_for_has() -> None:
    keys = block_keys(range(1000), 1)
    index = KvIndex()
    index.add(0, keys[:2], ROOT)
    index.add(1, keys, ROOT)
    looked_at = 0

    def watched() -> object:
        nonlocal looked_at
        for key in keys:
            looked_at += 1
            yield key

    assert index.find_matches(watched(), 0b01) == {0: PrefixMatch(2)}  # type: ignore[arg-type]
    assert looked_at == 3


def test_the_hook_hears_of_every_store_on_a_device() -> None:
    heard: list[tuple[int, int]] = []
    keys = block_keys(range(2), 1)
    index = KvIndex(on_stored=lambda slot, key: heard.append((slot, key)))
    index.add(4, keys, ROOT, Tier.HOST)
    index.add(4, keys, ROOT)
    index.add(4, keys[1:], keys[0])
    assert heard == [(4, keys[0]), (4, keys[1]), (4, keys[1])]


def test_one_slots_end_leaves_the_others_alone() -> None:
    keys = block_keys(range(4), 1)
    index = KvIndex()
    index.add(0, keys, ROOT)
    index.add(1, keys[:3], ROOT)
    index.clear(0)
    assert index.find_matches(keys, EVERYBODY) == {1: PrefixMatch(3)}
    assert len(index) == 3


def test_an_index_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_blocks"):
        KvIndex(max_blocks=0)


def test_a_cleared_slot_is_told_of_and_a_dropped_one_is_not() -> None:
    heard: list[int] = []
    index = KvIndex(on_cleared=heard.append)
    index.add(3, CHAINS[0], ROOT)
    index.clear(3)
    index.drop(3)
    assert heard == [3]


def test_forgetting_a_slot_is_left_to_the_sweep() -> None:
    keys = block_keys(range(10), 1)
    told: list[int] = []
    index = KvIndex(on_fading=lambda: told.append(len(index)))
    index.add(0, keys, ROOT)
    index.throw_away(dict.fromkeys(keys, 1))
    index.drop(0)
    assert len(told) == 2
    # Ten blocks and a table of ten, four at a time.
    assert [index.sweep(4) for _ in range(5)] == [True, True, True, True, False]
    assert not leftovers(index)


def test_what_fades_goes_before_what_is_held() -> None:
    index = KvIndex(max_blocks=6, on_fading=lambda: None)
    faded, old, new = (block_keys(range(start, start + 3), 1) for start in (0, 100, 200))
    index.add(0, old, ROOT)
    index.add(1, faded, ROOT)
    index.drop(1)
    index.add(0, new, ROOT)
    assert index.find_matches(old, 1) == index.find_matches(new, 1) == {0: PrefixMatch(3)}
    assert index.stats.evicted == 0
