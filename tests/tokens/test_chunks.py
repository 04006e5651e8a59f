"""The tokenization cache: exact, bounded, the least recently used forgotten first."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from picker.tokens.chunks import ChunkCache

IDS = array("I", range(10))


def test_parts_are_found_per_tokenizer() -> None:
    cache = ChunkCache(1 << 20)
    cache.store(1, [("a", IDS)])
    assert cache.find(1, ["a", "b", "a"]) == [IDS, None, IDS]
    assert cache.find(2, ["a"]) == [None]
    assert (cache.hits, cache.misses) == (2, 2)


def test_the_least_recently_used_goes_first() -> None:
    cache = ChunkCache(1 << 20)
    cache.store(1, [("a", IDS)])
    cache = ChunkCache(cache.size_bytes * 2)
    cache.store(1, [("a", IDS), ("b", IDS)])
    cache.find(1, ["a"])
    cache.store(1, [("c", IDS)])
    assert cache.find(1, ["a", "b", "c"]) == [IDS, None, IDS]
    assert cache.evictions == 1


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = ChunkCache(1000)
    cache.store(1, [("a" * 2000, IDS), ("b", IDS)])
    assert cache.find(1, ["a" * 2000, "b"]) == [None, IDS]


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=30), st.integers(0, 50))), st.integers(0, 3000))
def test_the_size_is_that_of_what_is_held(stored: list[tuple[int, str, int]], limit: int) -> None:
    cache = ChunkCache(limit)
    for tokenizer, part, length in stored:
        cache.store(tokenizer, [(part, array("I", range(length)))])
        assert cache.size_bytes <= limit
    assert (cache.size_bytes == 0) is (len(cache) == 0)
