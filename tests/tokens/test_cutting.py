"""Cutting a text changes nothing: the law, for every kind of tokenizer, over any text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from picker.tokens.cutting import Cutter
from tests.tokens.models import KINDS

_split = str.split

# Words, spaces and tokens next to each other far more often than chance would put them there.
_PIECES = st.sampled_from(
    [
        *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x00", "the wind", "THE WIND"),
        *".,;:!?)]}\"'>({[<_-/\\@#",
        *_split("the The wind x Z 's 'S don't 12 2048 ox <s> </s> <unk> <|im_start|> <|im_end|> [go] [stop]"),
        # Spaces as tokenizers write them, letters that fold or decompose, marks that combine, other scripts.
        *_split("\u2581 \u0120 \u00e9 e\u0301 \u0301 \u00df \u017f \u212a \u0130 \u0391\u03a3 \u200d \ufeff"),
        *_split(
            "\u5c71\u4e0a \u3002 \uff0c \u3001 \u304b \u304c \u3099 \u30ab \ud55c\uad6d \u11a8 \u05e9\u05dc"
        ),
        *_split("\u0445\u043e\u043b\u043c \u0418\u0306 \U0001f600 \U0001f468\u200d\U0001f469"),
    ]
)
_TEXTS = st.lists(_PIECES | st.text(max_size=3), max_size=40).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(text=_TEXTS, min_part=st.integers(1, 12))
@example(text="</s> x the wind", min_part=1)
@example(text="the[stop] x [go] x", min_part=1)
@example(text="the wind THE WIND ox  the", min_part=1)
def test_the_ids_of_the_parts_are_those_of_the_whole(
    kind: str, trained: Callable[[str], Tokenizer], text: str, min_part: int
) -> None:
    tokenizer = trained(kind)
    parts = list(_cutter(tokenizer, min_part).parts(text))
    encoded = tokenizer.encode_batch_fast(parts, add_special_tokens=False)
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert [token for part in encoded for token in part.ids] == whole


_CUTTERS: dict[tuple[int, int], Cutter] = {}


def _cutter(tokenizer: Tokenizer, min_part: int) -> Cutter:
    key = (id(tokenizer), min_part)
    if key not in _CUTTERS:
        _CUTTERS[key] = Cutter.of(json.loads(tokenizer.to_str()), min_part)
    return _CUTTERS[key]


PROSE = "It was a mild day, with a soft wind from the west and no rain at all. " * 40


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"uncuttable", "greedy_added_tokens"}))
def test_prose_is_cut_into_parts_of_about_the_wanted_size(
    kind: str, trained: Callable[[str], Tokenizer]
) -> None:
    parts = list(_cutter(trained(kind), 100).parts(PROSE))
    assert len(parts) > 15
    assert all(100 <= len(part) < 140 for part in parts[:-1])


def test_text_without_word_boundaries_is_cut_where_its_language_has_others(
    trained: Callable[[str], Tokenizer],
) -> None:
    text = (
        "\u5c71\u4e0a\u7684\u6c14\u8c61\u7ad9\u5f88\u5c0f\u3002\u6bcf\u5929\u8bb0\u5f55\u98ce\uff0c\u96e8\u548c\u6e29\u5ea6\u3002"
        * 20
    )
    assert len(list(_cutter(trained("llama3_like"), 50).parts(text))) > 5


def test_where_merges_cross_spaces_only_special_tokens_part_a_text(
    trained: Callable[[str], Tokenizer],
) -> None:
    cutter = _cutter(trained("uncuttable"), 10)
    assert list(cutter.parts(PROSE)) == [PROSE]
    turn = "<|im_start|>user\nthe wind and the rain<|im_end|>"
    assert [part[:6] for part in cutter.parts(turn * 3)][1:] == ["<|im_e", "<|im_s"] * 2 + ["<|im_e"]


def test_a_common_beginning_is_cut_alike(trained: Callable[[str], Tokenizer]) -> None:
    cutter = _cutter(trained("byte_bpe"), 100)
    first, second = (
        list(cutter.parts(PROSE + "one end")),
        list(cutter.parts(PROSE + "quite another end of it")),
    )
    assert first[:-2] == second[: len(first) - 2]


def _tokenizer(**changes: Any) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": r"\p{L}+|\s+|[^\s\p{L}]+"},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": split,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        **changes,
    }


def _token(content: str, **flags: bool) -> dict[str, Any]:
    return {
        "content": content,
        "special": True,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        **flags,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x"}, "content": ""}},
        {"pre_tokenizer": {"type": "UnicodeScripts"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\s"}, "behavior": "MergedWithPrevious"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\S+\s*"}, "behavior": "Isolated"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"(?<=a) b|\p{L}+"},
                "behavior": "Isolated",
            }
        },
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"\s+(?=\S)|\S+(?! )"},
                "behavior": "Isolated",
            }
        },
        {"pre_tokenizer": None},
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.1}},
        {"added_tokens": [_token("word", single_word=True)]},
    ],
)
def test_what_is_not_proven_is_not_cut(changes: dict[str, Any]) -> None:
    assert list(Cutter.of(_tokenizer(), 10).parts(PROSE)) != [PROSE]
    assert list(Cutter.of(_tokenizer(**changes), 10).parts(PROSE)) == [PROSE]


@pytest.mark.parametrize(
    ("tokens", "is_cut"),
    [
        ([_token("<a>")], True),
        ([_token("<a>", lstrip=True)], False),
        ([_token("<a>", normalized=True)], False),
        ([_token("<a>"), _token("x<a")], False),
        ([_token("<a>"), _token("<a>b")], True),
    ],
)
def test_a_token_that_could_begin_elsewhere_is_no_place_to_cut(
    tokens: list[dict[str, Any]], is_cut: bool
) -> None:
    cutter = Cutter.of(_tokenizer(pre_tokenizer=None, added_tokens=tokens), 5)
    assert (len(list(cutter.parts("one<a>two three<a>four<a>"))) > 1) is is_cut
