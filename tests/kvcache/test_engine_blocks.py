"""What engines' events mean for the index: names, copies, tiers, parents that come late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.kvcache.engine_blocks import BlockLimits, EngineBlocks
from picker.kvcache.events import AllBlocksCleared, Event, decode_batch
from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys
from picker.kvcache.matching import PrefixMatch
from tests.kvcache.wire import SIZE, as_map, as_row, hashes, payload, removed, stored, tokens

EVERYBODY = (1 << 64) - 1


class Fleet:
    """An index and the blocks of some endpoints, by slot."""

    def __init__(self, slots: int = 2, **settings: Any) -> None:
        self.index = KvIndex()
        self.engines = [EngineBlocks(slot, self.index, **settings) for slot in range(slots)]

    def apply(self, slot: int, *events: Event) -> None:
        self.engines[slot].apply(events)

    def cached(self, token_ids: Sequence[int], size: int = SIZE, **names: Any) -> dict[int, int]:
        """Slot -> blocks of this prompt that it holds."""
        matches = self.index.find_matches(block_keys(token_ids, size, **names), EVERYBODY)
        return {slot: match.blocks for slot, match in matches.items()}

    def match(self, token_ids: Sequence[int]) -> PrefixMatch | None:
        return self.index.find_matches(block_keys(token_ids, SIZE), 1).get(0)


def test_all_blocks_cleared_is_for_the_one_that_says_it() -> None:
    """C31."""
    fleet, prompt = Fleet(), tokens(4)
    fleet.apply(0, stored(prompt))
    fleet.apply(1, stored(prompt))
    fleet.apply(0, AllBlocksCleared())
    assert fleet.cached(prompt) == {1: 4}
    assert len(fleet.engines[0]) == 0
    fleet.apply(0, stored(prompt[:SIZE]))
    assert fleet.cached(prompt) == {0: 1, 1: 4}
    assert fleet.index.blocks_of(0) == 1


def test_a_cleared_blocks_children_have_no_parent_any_more() -> None:
    fleet, prompt = Fleet(), tokens(3)
    fleet.apply(0, stored(prompt[: 2 * SIZE]), AllBlocksCleared())
    fleet.apply(0, stored(prompt[2 * SIZE :], parent=hashes(prompt)[1]))
    assert fleet.cached(prompt) == {}
    assert fleet.engines[0].parked == 1


@pytest.mark.parametrize(
    "events",
    [
        [as_row(stored(tokens(3)))],
        [as_row(stored(tokens(3), block_hashes=[-5, -6, -7]))],
        [as_row(stored(tokens(3), block_hashes=[1, 2, 3]), 5)],
        [as_map(stored(tokens(3)))],
        [[*as_row(stored(tokens(3))), 1, 2, 3]],
        [as_map(stored(tokens(3))) | {"block_hashes": [bytes([n]) * 32 for n in (1, 2, 3)]}],
        [
            as_row(stored(tokens(3))),
            ["Unknown", 1],
            as_row(stored(tokens(1, start=9))),
        ],
    ],
    ids=["rows", "negative", "no optional tail", "maps", "more fields", "digests", "unknown between"],
)
def test_every_layout_gives_the_same_content(events: list[Any]) -> None:
    """C37."""
    fleet = Fleet()
    fleet.engines[0].apply(decode_batch(payload(*events)).events)
    assert fleet.cached(tokens(3)) == {0: 3}


def test_adapters_and_salts_are_told_apart() -> None:
    """C38: the first string is the adapter where it equals the event's name, and a salt or a medium otherwise."""
    fleet, prompt = Fleet(slots=3), tokens(2)
    fleet.apply(0, stored(prompt, lora_name="ad1", extra_keys=[["ad1"], ["ad1"]]))
    fleet.apply(1, stored(prompt))
    fleet.apply(2, stored(prompt, lora_name="ad1", extra_keys=[["ad1", "ad1"], ["ad1"]]))
    assert fleet.cached(prompt, adapter="ad1") == {0: 2}
    assert fleet.cached(prompt) == {1: 2}
    assert fleet.cached(prompt, adapter="ad2") == {}
    assert fleet.cached(prompt, salt="s") == {}
    assert fleet.cached(prompt, adapter="ad1", salt="ad1") == {2: 2}


@pytest.mark.parametrize(
    "fields",
    [{"extra_keys": [["s"], None]}, {"cache_salt": "s"}],
    ids=["vLLM: in the first block's extra keys", "SGLang: a field of its own"],
)
def test_a_salt_counts_from_the_first_block_on(fields: dict[str, Any]) -> None:
    fleet, prompt = Fleet(), tokens(3)
    names = hashes(prompt)
    fleet.apply(0, stored(prompt[: 2 * SIZE], **fields))
    again = {name: value for name, value in fields.items() if name == "cache_salt"}
    fleet.apply(0, stored(prompt[2 * SIZE :], parent=names[1], block_hashes=names[2:], **again))
    assert fleet.cached(prompt, salt="s") == {0: 3}
    assert fleet.cached(prompt) == fleet.cached(prompt, salt="t") == {}


@pytest.mark.parametrize("entry", ["image", ["image", 3], ["image", 0]], ids=repr)
def test_media_are_known_by_id_wherever_they_lie_in_the_block(entry: Any) -> None:
    fleet, prompt = Fleet(), tokens(3)
    fleet.apply(0, stored(prompt, extra_keys=[None, [entry], [entry]]))
    assert fleet.cached(prompt, media={1: ["image"], 2: ["image"]}) == {0: 3}
    assert fleet.cached(prompt) == {0: 1}


def test_an_adapter_known_only_by_number_is_not_the_base_model() -> None:
    fleet, prompt = Fleet(), tokens(2)
    fleet.apply(0, stored(prompt, lora_id=1))
    assert fleet.cached(prompt) == {}


def test_an_offloaded_block_outlives_its_copy_on_the_device() -> None:
    """C39: offload tiers store blocks by hash, without tokens."""
    fleet, prompt = Fleet(), tokens(2)
    names = hashes(prompt)
    fleet.apply(0, stored(prompt))
    fleet.apply(0, stored([], block_hashes=names, medium="CPU"))
    assert fleet.match(prompt) == PrefixMatch(2)
    fleet.apply(0, removed(names, medium="GPU"))
    assert fleet.match(prompt) == PrefixMatch(0, host=2)
    fleet.apply(0, removed(names, medium="CPU"))
    assert fleet.match(prompt) is None
    stats = fleet.engines[0].stats
    assert (stats.malformed, stats.odd_sized, stats.unknown_removals) == (0, 0, 0)
    assert len(fleet.engines[0]) == 0


def test_an_offloaded_block_may_be_known_before_its_tokens() -> None:
    fleet, prompt = Fleet(), tokens(2)
    fleet.apply(0, stored([], block_hashes=hashes(prompt), medium="CPU"))
    assert fleet.match(prompt) is None
    fleet.apply(0, stored(prompt), removed(hashes(prompt)))
    assert fleet.match(prompt) == PrefixMatch(0, host=2)


def test_a_block_in_two_slow_media_stays_until_both_are_gone() -> None:
    fleet, prompt = Fleet(), tokens(1)
    fleet.apply(
        0, stored(prompt, medium="FS"), stored(prompt, medium="OBJ"), removed(hashes(prompt), medium="FS")
    )
    assert fleet.match(prompt) == PrefixMatch(0, disk=1)
    fleet.apply(0, removed(hashes(prompt), medium="OBJ"))
    assert fleet.match(prompt) is None


def test_a_medium_that_we_do_not_know_is_slow() -> None:
    fleet, prompt = Fleet(), tokens(1)
    fleet.apply(0, stored(prompt, medium="TAPE"))
    assert fleet.match(prompt) == PrefixMatch(0, disk=1)


@pytest.mark.parametrize("kind", ["mamba", "sliding_window", "chunked_local_attention", None])
def test_a_group_that_keeps_only_some_blocks_says_nothing_of_the_prefix(kind: str | None) -> None:
    """C39: one hash for many tokens, in the same batch as the attention group's five."""
    fleet, prompt = Fleet(), tokens(5)
    names = hashes(prompt)
    fleet.apply(
        0,
        stored(prompt, group_idx=0, kv_cache_spec_kind=kind and "full_attention"),
        stored(prompt, block_hashes=names[-1:], group_idx=1, kv_cache_spec_kind=kind),
        removed(names[-1:], group_idx=1),
    )
    assert fleet.cached(prompt) == {0: 5}
    assert fleet.engines[0].stats.ignored_groups == 1


def test_a_second_group_of_full_attention_keeps_a_block_too() -> None:
    fleet, prompt = Fleet(), tokens(2)
    for group in (0, 1):
        fleet.apply(0, stored(prompt, group_idx=group, kv_cache_spec_kind="full_attention"))
    fleet.apply(0, removed(hashes(prompt), group_idx=0))
    assert fleet.cached(prompt) == {0: 2}
    fleet.apply(0, removed(hashes(prompt), group_idx=1))
    assert fleet.cached(prompt) == {}


def test_copies_are_counted() -> None:
    """A block that is computed again is stored again under its hash, and removed as often as stored."""
    fleet, prompt = Fleet(), tokens(1)
    fleet.apply(
        0, stored(prompt), stored(prompt), stored(prompt), removed(hashes(prompt)), removed(hashes(prompt))
    )
    assert fleet.cached(prompt) == {0: 1}
    fleet.apply(0, removed(hashes(prompt)))
    assert fleet.cached(prompt) == {}
    fleet.apply(0, removed(hashes(prompt)))
    assert fleet.engines[0].stats.unknown_removals == 1


def test_an_engine_that_keeps_one_copy_removes_it_once() -> None:
    fleet, prompt = Fleet(counted=False), tokens(1)
    fleet.apply(0, stored(prompt), stored(prompt), removed(hashes(prompt)))
    assert fleet.cached(prompt) == {}


def test_removals_may_name_many_blocks() -> None:
    fleet, prompt = Fleet(), tokens(4)
    fleet.apply(0, stored(prompt), removed([*hashes(prompt)[2:], 99]))
    assert fleet.cached(prompt) == {0: 2}


def test_order_within_a_batch_counts() -> None:
    fleet, prompt = Fleet(), tokens(1)
    name = hashes(prompt)
    fleet.apply(0, stored(prompt), removed(name), stored(prompt))
    assert fleet.cached(prompt) == {0: 1}
    fleet.apply(0, removed(name), stored(prompt), removed(name))
    assert fleet.cached(prompt) == {}


def test_a_long_prompt_comes_piece_by_piece() -> None:
    fleet, prompt = Fleet(), tokens(20)
    names = hashes(prompt)
    for start, stop in ((0, 8), (8, 16), (16, 20)):
        piece = prompt[start * SIZE : stop * SIZE]
        parent = names[start - 1] if start else None
        fleet.apply(0, stored(piece, parent=parent, block_hashes=names[start:stop]))
        assert fleet.cached(prompt) == {0: stop}


def piece(prompt: list[int], number: int) -> Event:
    """One block of the prompt, stored on its own."""
    names = hashes(prompt)
    body = prompt[number * SIZE : (number + 1) * SIZE]
    return stored(body, parent=names[number - 1] if number else None, block_hashes=[names[number]])


@given(st.permutations(range(6)))
def test_blocks_may_come_before_their_parents(order: list[int]) -> None:
    fleet, prompt = Fleet(), tokens(6)
    for number in order:
        fleet.apply(0, piece(prompt, number))
    assert fleet.cached(prompt) == {0: 6}
    stats = fleet.engines[0].stats
    assert fleet.engines[0].parked == 0
    assert stats.parked == stats.adopted


def test_a_block_removed_while_it_waited_is_not_credited() -> None:
    fleet, prompt = Fleet(), tokens(3)
    fleet.apply(0, piece(prompt, 1), piece(prompt, 2), removed(hashes(prompt)[1:2]), piece(prompt, 0))
    assert fleet.cached(prompt) == {0: 1}
    fleet.apply(0, piece(prompt, 1))
    assert fleet.cached(prompt) == {0: 3}


def test_waiting_blocks_are_bounded_and_the_oldest_give_way() -> None:
    fleet = Fleet(limits=BlockLimits(parked=3))
    for start in range(5):
        fleet.apply(0, stored(tokens(1, start=start), parent=start + 1))
    engine = fleet.engines[0]
    assert (engine.parked, engine.stats.abandoned) == (3, 2)


def test_blocks_over_the_limit_are_not_indexed_and_nothing_breaks() -> None:
    fleet, first, second = Fleet(limits=BlockLimits(blocks=3)), tokens(3), tokens(2, start=5)
    fleet.apply(
        0, stored(first), stored(second), removed(hashes(second)), removed(hashes(first)), stored(second)
    )
    assert fleet.cached(first) == {}
    assert fleet.cached(second) == {0: 2}
    assert fleet.engines[0].stats.overflow == 2


def test_zero_as_a_parent_means_none_unless_it_is_a_block() -> None:
    fleet, prompt = Fleet(), tokens(2)
    fleet.apply(0, stored(prompt[:SIZE], parent=0, block_hashes=[5]))
    assert fleet.cached(prompt) == {0: 1}
    fleet.apply(1, stored(prompt[:SIZE], block_hashes=[0]), stored(prompt[SIZE:], parent=0, block_hashes=[6]))
    assert fleet.cached(prompt) == {0: 1, 1: 2}


def test_the_block_size_is_the_engines_own() -> None:
    sizes: list[int] = []
    fleet, prompt = Fleet(on_block_size=sizes.append), tokens(4)
    fleet.apply(0, stored(prompt, size=32), stored(prompt, size=32))
    assert (sizes, fleet.engines[0].block_size) == ([32], 32)
    assert fleet.cached(prompt, size=32) == {0: 2}
    assert fleet.cached(prompt, size=16) == {}


def test_an_engine_that_comes_back_with_smaller_blocks_is_followed() -> None:
    fleet, prompt = Fleet(), tokens(4)
    fleet.apply(0, stored(prompt, size=32))
    fleet.engines[0].clear()
    fleet.apply(0, stored(prompt, size=16))
    assert fleet.engines[0].block_size == 16
    assert fleet.cached(prompt, size=16) == {0: 4}


def test_a_block_shorter_than_the_engines_is_a_tail_and_not_indexed() -> None:
    sizes: list[int] = []
    fleet, prompt = Fleet(on_block_size=sizes.append), tokens(2)
    fleet.apply(0, stored(prompt[:20], size=20), stored(prompt, size=32), stored(prompt[:7], size=7))
    assert sizes == [20, 32]
    assert fleet.engines[0].stats.odd_sized == 1
    assert fleet.cached(prompt, size=32) == {0: 1}


@pytest.mark.parametrize("size", [0, -16, 5])
def test_tokens_that_do_not_fill_the_blocks_are_not_indexed(size: int) -> None:
    fleet, prompt = Fleet(), tokens(2)
    fleet.apply(0, stored(prompt, size=size, block_hashes=[1, 2]))
    assert fleet.engines[0].stats.odd_sized == 2
    assert len(fleet.index) == 0


@pytest.mark.parametrize(
    "fields", [{"extra_keys": 5}, {"extra_keys": ["xy", None]}, {"extra_keys": [[{}], None]}], ids=repr
)
def test_extra_keys_that_make_no_sense_cost_only_their_event(fields: dict[str, Any]) -> None:
    fleet, prompt, other = Fleet(), tokens(2), tokens(2, start=5)
    fleet.apply(0, stored(prompt, **fields), stored(other), removed(hashes(prompt)))
    assert fleet.engines[0].stats.malformed == 1
    assert fleet.cached(other) == {0: 2}
    assert len(fleet.engines[0]) == 2


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_that_are_none_cost_only_their_event(token: int) -> None:
    fleet, prompt = Fleet(), tokens(1)
    fleet.apply(0, stored([token, *prompt[1:]], block_hashes=[7]), stored(prompt))
    assert fleet.engines[0].stats.malformed == 1
    assert fleet.cached(prompt) == {0: 1}


def test_events_after_the_end_of_an_endpoint_change_nothing() -> None:
    """C35: the slot may be another endpoint's by then."""
    fleet, prompt = Fleet(), tokens(3)
    old, new = fleet.engines[0], EngineBlocks(0, fleet.index)
    old.apply([stored(prompt)])
    old.close()
    assert fleet.cached(prompt) == {}
    new.apply([stored(prompt[:SIZE])])
    old.apply([stored(prompt), AllBlocksCleared()])
    old.close()
    assert fleet.cached(prompt) == {0: 1}
    assert old.stats.late == 2


NAMES = hashes(tokens(4))
RANDOM_EVENTS = st.one_of(
    st.builds(lambda number: piece(tokens(4), number), st.integers(0, 3)),
    st.builds(
        lambda number, medium: removed([NAMES[number]], medium=medium),
        st.integers(0, 3),
        st.sampled_from(["GPU", "CPU"]),
    ),
    st.builds(lambda number: stored([], block_hashes=[NAMES[number]], medium="CPU"), st.integers(0, 3)),
    st.builds(AllBlocksCleared),
)


@given(st.lists(st.tuples(st.integers(0, 1), RANDOM_EVENTS), max_size=30))
def test_an_endpoint_is_never_credited_with_a_block_that_it_does_not_hold(
    steps: list[tuple[int, Event]],
) -> None:
    """Against copies counted by hand. What it holds may be credited with a delay, by an unknown parent."""
    fleet, prompt = Fleet(), tokens(4)
    copies: dict[tuple[int, str, int], int] = {}
    for slot, event in steps:
        fleet.apply(slot, event)
        if isinstance(event, AllBlocksCleared):
            copies = {place: count for place, count in copies.items() if place[0] != slot}
            continue
        for name in event.block_hashes:
            place = (slot, event.medium or "GPU", name)
            change = 1 if hasattr(event, "token_ids") else -1
            copies[place] = max(0, copies.get(place, 0) + change)
    for slot in (0, 1):
        held = {name for (owner, _medium, name), count in copies.items() if owner == slot and count}
        prefix = next((number for number, name in enumerate(NAMES) if name not in held), len(NAMES))
        assert fleet.cached(prompt).get(slot, 0) <= prefix
        assert len(fleet.engines[slot]) == sum(
            count > 0 for place, count in copies.items() if place[0] == slot
        )
