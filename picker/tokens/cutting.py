"""Where a text can be cut so that the ids of its parts, put together, are the ids of the whole.

`Cutter.of` reads a `tokenizer.json` and proves, for pairs of adjacent characters such as a letter and a space, that a
cut between them changes nothing at any stage: added tokens, normalizer, pre-tokenizer, model. What it cannot prove it
does not use; a tokenizer for which nothing can be proven is never cut.

Cuts are chosen by looking at the text near them only. So two texts with a common beginning are cut alike there, and the
same passage gives the same parts wherever it stands.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from picker.tokens.split_pattern import CharGroup, SplitPattern, UnknownSyntax

MIN_PART = 2048
"""Characters of a part before a cut is looked for."""

_LOWER = CharGroup("a", "z")
_UPPER = CharGroup("A", "Z")
_DIGITS = CharGroup("0", "9")
# Their general categories have not changed since Unicode 1.1, so every engine's tables agree on them.
_OTHER_LETTERS = (
    CharGroup("\u0430", "\u044f"),  # Cyrillic, small
    CharGroup("\u0410", "\u042f"),  # Cyrillic, capital
    CharGroup("\u05d0", "\u05ea"),  # Hebrew
    CharGroup("\u3042", "\u3042"),  # the commonest kana stand for themselves only
    CharGroup("\u3044", "\u3044"),
    CharGroup("\u305f", "\u305f"),
    CharGroup("\u308b", "\u308b"),
    CharGroup("\u306e", "\u306e"),
    CharGroup("\u4e00", "\u9fa5"),  # Han
    CharGroup("\uac00", "\ud7a3"),  # Hangul
)
_MARKS = tuple(CharGroup(char, char) for char in ".,;:!?)]}\"'>")
_SPACE = CharGroup(" ", " ")
_LINE_END = CharGroup("\n", "\n")
_FULL_STOPS = tuple(CharGroup(char, char) for char in "\u3002\uff0c\u3001\uff01\uff1f")

# What a space becomes: with SentencePiece's convention, and as one of the characters that stand for bytes.
_METASPACE = "\u2581"
_BYTE_SPACE = "\u0120"


class _CannotCut(Exception):
    """A stage of the tokenizer for which cutting is not proven safe."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A kind of place: a character of `left`, the cut, a character of `right`."""

    left: CharGroup
    right: CharGroup


@dataclass(frozen=True, slots=True)
class _Stage:
    """What is known after some stages: the pairs still safe, those that are boundaries by now, what a space became."""

    pairs: frozenset[_Pair]
    boundaries: frozenset[_Pair] = frozenset()
    space: str = " "
    drop_space: bool = False
    """The right part loses its leading space, because the normalizer puts one in front of every part."""


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts texts into parts that can be encoded on their own."""

    places: re.Pattern[str] | None
    """Matches up to a cut; None: this tokenizer's texts are never cut."""
    drop_space: bool = False
    min_part: int = MIN_PART

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any], min_part: int = MIN_PART) -> Cutter:
        """Work out the safe places from the contents of a `tokenizer.json`."""
        places, drop_space = _safe_places(tokenizer)
        return cls(places, drop_space, min_part)

    def parts(self, text: str) -> Iterator[str]:
        """The parts of a text, in order. Each but the last is at least `min_part` characters long."""
        start = 0
        while self.places is not None and len(text) - start > self.min_part:
            match = self.places.search(text, start + self.min_part)
            if match is None:
                break
            yield text[start : match.end()]
            start = match.end() + self.drop_space
        yield text[start:]


def _safe_places(tokenizer: Mapping[str, Any]) -> tuple[re.Pattern[str] | None, bool]:
    """What to look for, and whether a space is dropped there."""
    tokens = [token for token in tokenizer.get("added_tokens") or () if token["content"]]
    if any(token.get("single_word") for token in tokens) or (tokenizer["model"].get("dropout") or 0) > 0:
        return None, False
    try:
        stage = _after_added_tokens(_Stage(_candidates()), tokens)
        stage = _after_normalizer(stage, tokenizer.get("normalizer"))
        if stage.drop_space:
            stage = _between_words(stage, tokens)
        stage = _after_pre_tokenizer(stage, tokenizer.get("pre_tokenizer"))
        stage = _after_model(stage, tokenizer["model"])
    except (_CannotCut, UnknownSyntax):
        stage = _Stage(frozenset())
    choices = _pair_places(stage.boundaries, stage.drop_space)
    if not choices or not stage.drop_space:
        choices += _token_starts(tokens)
    drop_space = stage.drop_space and bool(stage.boundaries)
    return (re.compile("|".join(choices)) if choices else None), drop_space


def _candidates() -> frozenset[_Pair]:
    words = (_LOWER, _UPPER, _DIGITS, *_OTHER_LETTERS)
    return frozenset(
        [_Pair(left, right) for left in (*words, *_MARKS) for right in (_SPACE, _LINE_END)]
        + [_Pair(left, stop) for left in _OTHER_LETTERS for stop in _FULL_STOPS]
    )


def _pair_places(pairs: frozenset[_Pair], drop_space: bool) -> list[str]:
    lefts_of: dict[str, list[str]] = {}
    for pair in pairs:
        left = f"{re.escape(pair.left.low)}-{re.escape(pair.left.high)}"
        lefts_of.setdefault(pair.right.low, []).append(left)
    # Where the space goes, what follows it must be text: a token or the end there would lose it.
    after = " [A-Za-z0-9]" if drop_space else ""
    return [
        f"[{''.join(sorted(lefts))}](?={after or re.escape(right)})"
        for right, lefts in sorted(lefts_of.items())
    ]


# Added tokens.


def _after_added_tokens(stage: _Stage, tokens: list[Mapping[str, Any]]) -> _Stage:
    """No added token may lie across a cut: its text must not hold such a pair, nor may it swallow the space after it.

    Tokens that are found in normalized text count with a space in any form.
    """
    side_by_side: set[tuple[str, str]] = set()
    for token in tokens:
        content: str = token["content"].replace(_METASPACE, " ")
        neighbours = set(itertools.pairwise(content))
        if token.get("rstrip"):
            neighbours |= {(content[-1], " "), (content[-1], "\n")}
        if token.get("normalized"):
            neighbours |= {
                (case(left), right) for left, right in neighbours for case in (str.lower, str.upper)
            }
        side_by_side |= neighbours
    return _without(stage, side_by_side)


def _without(stage: _Stage, side_by_side: Iterable[tuple[str, str]]) -> _Stage:
    """Drop the pairs of which some characters are found side by side."""
    lefts_of: dict[str, set[str]] = {}
    for left, right in side_by_side:
        lefts_of.setdefault(right, set()).add(left)
    pairs = (pair for pair in stage.pairs if not _holds_any(pair.left, lefts_of.get(pair.right.low, ())))
    return replace(stage, pairs=frozenset(pairs))


def _holds_any(group: CharGroup, chars: Iterable[str]) -> bool:
    return any(group.low <= char <= group.high for char in chars)


def _token_starts(tokens: list[Mapping[str, Any]]) -> list[str]:
    """Places right before a special token.

    Text is split at added tokens before anything else happens to it. A token is good for a cut if it is looked for in
    raw text, does not swallow the space before it, and no other token can begin before it and end inside it.
    """
    contents = [token["content"] for token in tokens]
    chosen = [
        token["content"]
        for token in tokens
        if token.get("special") and not token.get("normalized") and not token.get("lstrip")
    ][:_MAX_TOKEN_STARTS]
    safe = [content for content in chosen if not any(_can_overlap(other, content) for other in contents)]
    if not safe:
        return []
    # Most characters are ruled out by the first one.
    first = "".join(sorted({re.escape(content[0]) for content in safe}))
    return [f"(?=[{first}])(?={'|'.join(map(re.escape, safe))})"]


_MAX_TOKEN_STARTS = 64


def _can_overlap(other: str, token: str) -> bool:
    """Whether some text holds `other` beginning before `token` and reaching into it."""
    return any(
        other.startswith(token[: len(other) - at], at) for at in range(1, len(other)) if other[at] == token[0]
    )


# Normalizers.


def _after_normalizer(stage: _Stage, normalizer: Mapping[str, Any] | None) -> _Stage:
    if normalizer is None:
        return stage
    match normalizer["type"]:
        case "Sequence":
            for item in normalizer["normalizers"]:
                stage = _after_normalizer(stage, item)
            return stage
        case "NFC":
            # None of these characters is changed, none of the right ones combines with what stands before it.
            return stage
        case "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents" | "BertNormalizer" | "Precompiled":
            # Character by character (or cluster), and ASCII stays ASCII; but a letter may change its case.
            return _only_plain(stage)
        case "Replace" if stage.space == " ":
            return _after_replace(stage, normalizer)
        case "Prepend" if normalizer["prepend"] == _METASPACE and not stage.drop_space:
            spaces = frozenset(pair for pair in stage.pairs if pair.right == _SPACE)
            return replace(stage, pairs=spaces, drop_space=True)
    raise _CannotCut(normalizer["type"])


def _only_plain(stage: _Stage) -> _Stage:
    pairs = {pair for pair in stage.pairs if pair.left.high < "\x80" and pair.right.high < "\x80"}
    # Either case of a letter may come out as the other: only where both are safe is one.
    for right in (_SPACE, _LINE_END):
        both = {_Pair(_LOWER, right), _Pair(_UPPER, right)}
        if not both <= pairs:
            pairs -= both
    return replace(stage, pairs=frozenset(pairs))


def _after_replace(stage: _Stage, normalizer: Mapping[str, Any]) -> _Stage:
    pattern = normalizer["pattern"].get("String")
    if pattern == " " and normalizer["content"] == _METASPACE:
        return replace(stage, space=_METASPACE)
    raise _CannotCut("Replace")


def _between_words(stage: _Stage, tokens: list[Mapping[str, Any]]) -> _Stage:
    """Where the space goes, it must have stood inside one stretch of text: not right behind an added token, nor before
    one (what follows it is a letter or a digit)."""
    if any(token["content"][0].isalnum() for token in tokens):
        raise _CannotCut("added tokens that begin like words")
    return _without(stage, {(token["content"][-1], " ") for token in tokens})


# Pre-tokenizers.

# GPT-2's expression, which ByteLevel applies by default.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _after_pre_tokenizer(stage: _Stage, pre_tokenizer: Mapping[str, Any] | None) -> _Stage:
    if pre_tokenizer is None:
        return stage
    match pre_tokenizer["type"]:
        case "Sequence":
            for item in pre_tokenizer["pretokenizers"]:
                stage = _after_pre_tokenizer(stage, item)
            return stage
        case "Split":
            return _after_split(stage, pre_tokenizer)
        case kind if stage.drop_space:
            raise _CannotCut(kind)
        case "ByteLevel":
            if pre_tokenizer.get("add_prefix_space", True):
                # A space is put before each piece that does not begin with one.
                stage = _restrict(stage, lambda pair: pair.right == _SPACE or pair in stage.boundaries)
            if pre_tokenizer.get("use_regex", True):
                stage = _after_pattern(stage, _GPT2)
            return replace(stage, space=_BYTE_SPACE)
        case "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer":
            stage = _restrict(stage, lambda pair: pair.right.is_space)
            return replace(stage, boundaries=stage.pairs)
        case "Metaspace":
            return _after_metaspace(stage, pre_tokenizer)
        case "Digits":
            return stage
        case "Punctuation" if pre_tokenizer.get("behavior", "Isolated") == "Isolated":
            return stage
    raise _CannotCut(pre_tokenizer["type"])


def _restrict(stage: _Stage, keep: Callable[[_Pair], bool]) -> _Stage:
    pairs = frozenset(filter(keep, stage.pairs))
    return replace(stage, pairs=pairs, boundaries=stage.boundaries & pairs)


def _after_metaspace(stage: _Stage, pre_tokenizer: Mapping[str, Any]) -> _Stage:
    """Spaces become the replacement, and pieces begin at it; a part that begins with a space gets no second one."""
    if pre_tokenizer["replacement"] != _METASPACE or stage.space != " ":
        raise _CannotCut("Metaspace")
    stage = _restrict(stage, lambda pair: pair.right == _SPACE)
    if pre_tokenizer.get("split", True):
        return replace(stage, boundaries=stage.pairs, space=_METASPACE)
    return replace(stage, space=_METASPACE)


def _after_split(stage: _Stage, pre_tokenizer: Mapping[str, Any]) -> _Stage:
    behavior, inverted = pre_tokenizer["behavior"], pre_tokenizer.get("invert", False)
    literal = pre_tokenizer["pattern"].get("String")
    if literal is not None and " " in literal and stage.space != " ":
        # It looks for a space, and there is none left.
        return stage
    if behavior != "Isolated" and not (behavior == "Removed" and inverted):
        raise _CannotCut(f"Split {behavior}")
    pattern = pre_tokenizer["pattern"].get("Regex")
    if pattern is None or stage.space != " " or stage.drop_space:
        raise _CannotCut("Split")
    return _after_pattern(stage, pattern)


def _after_pattern(stage: _Stage, text: str) -> _Stage:
    pattern = SplitPattern(text)
    safe = frozenset(
        pair
        for pair in stage.pairs
        if pair in stage.boundaries or pattern.never_crosses(pair.left, pair.right)
    )
    new = frozenset(pair for pair in safe if pattern.always_matches(pair.left))
    return replace(stage, pairs=safe, boundaries=(stage.boundaries & safe) | new)


# Models.


def _after_model(stage: _Stage, model: Mapping[str, Any]) -> _Stage:
    """Pieces are encoded one by one, so a boundary between pieces is one between their ids.

    Without such boundaries a pair is still safe for merges (BPE) if both characters are known and no entry of the
    vocabulary holds them side by side: then no merge can ever join them, and merges left and right of the cut do
    not touch.
    """
    kind = model.get("type") or ("BPE" if "merges" in model else "")
    if kind in ("WordPiece", "WordLevel", "Unigram", "BPE") and stage.boundaries:
        return stage
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if kind != "BPE" or affixes or model.get("ignore_merges"):
        raise _CannotCut(str(kind))
    vocabulary: Mapping[str, int] = model["vocab"]
    joined = "\0".join(vocabulary)
    joinable = {
        (before[-1], right.low)
        for right in {pair.right for pair in stage.pairs}
        for before in joined.split(_as_in_model(right, stage))[:-1]
        if before
    }
    safe = _without(stage, joinable)
    known = frozenset(
        pair
        for pair in safe.pairs
        if _as_in_model(pair.right, stage) in vocabulary and all(char in vocabulary for char in pair.left)
    )
    return replace(safe, boundaries=known)


def _as_in_model(right: CharGroup, stage: _Stage) -> str:
    """The character right of a cut as the model gets to see it."""
    return stage.space if right == _SPACE else right.low
