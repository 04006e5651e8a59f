"""A faster library is used only where it gives the very same ids."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from picker.tokens.encoding import Encode, encoder
from tests.tokens.models import KINDS, byte_bpe

TEXT = "It's  a plain answer,\n\nin 2 lines."


def own_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[array[int]]:
    return [array("I", tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def install(monkeypatch: pytest.MonkeyPatch, encode: Callable[[Tokenizer, str], list[int]]) -> list[str]:
    """A stand-in for the library, and the texts that it is asked for."""
    asked: list[str] = []

    class Made:
        def __init__(self, source: str) -> None:
            self.tokenizer = Tokenizer.from_str(source)

        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            assert not add_special_tokens
            asked.extend(texts)
            ids, ends = array("I"), array("Q", [0])
            for text in texts:
                ids.extend(encode(self.tokenizer, text))
                ends.append(len(ids))
            return ids.tobytes(), ends.tobytes()

    monkeypatch.setitem(
        sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=Made))
    )
    return asked


def right(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def wrong_about_digits(tokenizer: Tokenizer, text: str) -> list[int]:
    return right(tokenizer, text.replace("2026", "2025"))


def raising(tokenizer: Tokenizer, text: str) -> list[int]:
    raise ValueError("no such normalizer")


@pytest.mark.parametrize("encode", [wrong_about_digits, raising])
def test_a_library_that_differs_or_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch, encode: Callable[[Tokenizer, str], list[int]]
) -> None:
    asked = install(monkeypatch, encode)
    tokenizer = byte_bpe()
    encoding = encoder(tokenizer)
    asked.clear()
    assert encoding([TEXT, ""]) == own_ids(tokenizer, [TEXT, ""])
    assert not asked


def test_one_that_proves_to_be_exact_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = install(monkeypatch, right)
    tokenizer = byte_bpe()
    encoding = encoder(tokenizer)
    asked.clear()
    assert encoding([TEXT, "", "x"]) == own_ids(tokenizer, [TEXT, "", "x"])
    assert asked == [TEXT, "", "x"]


def test_without_the_library_the_tokenizers_own_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer = byte_bpe()
    assert encoder(tokenizer)([TEXT]) == own_ids(tokenizer, [TEXT])


@pytest.fixture(scope="module")
def encoders() -> list[tuple[Tokenizer, Encode]]:
    pytest.importorskip("fastokens", reason="the extra `fast` is not installed")
    made = [kind() for kind in KINDS.values()]
    return [(tokenizer, encoder(tokenizer)) for tokenizer in made]


@given(st.lists(st.text(max_size=60), max_size=4))
def test_any_text_has_the_same_ids(encoders: list[tuple[Tokenizer, Encode]], texts: list[str]) -> None:
    for tokenizer, encoding in encoders:
        assert encoding(texts) == own_ids(tokenizer, texts)
