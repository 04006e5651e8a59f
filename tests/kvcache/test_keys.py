"""Block keys: a chain that tells apart whatever an engine tells apart."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.kvcache.keys import block_keys, chain, pack_tokens, root_key

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(TOKEN_IDS, TOKEN_IDS, st.integers(1, 9))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(head: list[int], tail: list[int], size: int) -> None:
    keys = block_keys(head + tail, size)
    assert keys[: len(head) // size] == block_keys(head, size)
    assert len(keys) == (len(head) + len(tail)) // size


@given(TOKEN_IDS, st.integers(1, 9), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(
    ids: list[int], size: int, data: st.DataObject
) -> None:
    keys = block_keys(ids, size)
    if not keys:
        return
    place = data.draw(st.integers(0, len(keys) * size - 1))
    other = [*ids]
    other[place] ^= 1
    changed = block_keys(other, size)
    assert changed[: place // size] == keys[: place // size]
    assert not set(changed[place // size :]) & set(keys[place // size :])


@given(TOKEN_IDS, st.integers(1, 9), st.integers(0, 9))
def test_a_chain_can_be_computed_in_pieces(ids: list[int], size: int, cut: int) -> None:
    first = chain(root_key(size, None), pack_tokens(ids[: cut * size]), size)
    rest = chain(first[-1] if first else root_key(size, None), pack_tokens(ids[len(first) * size :]), size)
    assert first + rest == block_keys(ids, size)


@given(TOKEN_IDS, st.integers(1, 9))
def test_the_container_of_the_ids_does_not_matter(ids: list[int], size: int) -> None:
    keys = block_keys(ids, size)
    assert (
        keys
        == block_keys(tuple(ids), size)
        == block_keys(array("I", ids), size)
        == block_keys(array("Q", ids), size)
    )


def test_nothing_that_changes_what_is_cached_shares_a_key() -> None:
    ids = list(range(16))
    variants = [
        block_keys(ids, 4),
        block_keys(ids, 8),
        block_keys(ids, 4, adapter="a"),
        block_keys(ids, 4, adapter=""),
        block_keys(ids, 4, adapter="b"),
        block_keys(ids, 4, salt="a"),
        block_keys(ids, 4, salt="b"),
        block_keys(ids, 4, adapter="a", salt="a"),
        block_keys(ids, 4, media={0: ["x"]}),
        block_keys(ids, 4, media={0: ["x", "y"]}),
        block_keys(ids, 4, media={0: ["xy"]}),
        block_keys(ids, 4, media={0: ["y", "x"]}),
    ]
    every = [key for keys in variants for key in keys]
    assert len(set(every)) == len(every)


def test_media_change_only_their_block_and_what_follows() -> None:
    ids = list(range(16))
    plain, image = block_keys(ids, 4), block_keys(ids, 4, media={2: ["image"]})
    assert [one == other for one, other in zip(plain, image, strict=True)] == [True, True, False, False]


def test_media_after_the_last_full_block_do_not_count() -> None:
    assert block_keys(range(10), 4, media={2: ["image"]}) == block_keys(range(10), 4)


def test_salt_of_a_prompt_without_a_full_block_is_no_error() -> None:
    assert block_keys([1, 2], 4, salt="s") == []


def test_a_lone_surrogate_is_a_name_like_any_other() -> None:
    assert block_keys(range(4), 4, salt="\ud83d") != block_keys(range(4), 4, salt="\ud83e")


def test_the_chain_stays_what_it_is() -> None:
    """Replicas and recordings rely on equal keys; a change of the definition must be meant."""
    assert block_keys(range(8), 4, adapter="a", salt="s", media={1: ["m"]}) == [
        16239891133976440199,
        775434295819826766,
    ]


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5], [None]])
def test_what_is_no_token_id_is_a_value_error(ids: list[object]) -> None:
    with pytest.raises(ValueError, match="token id"):
        block_keys(ids, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_has_at_least_one_token(size: int) -> None:
    with pytest.raises(ValueError, match="block size"):
        block_keys([1, 2], size)
