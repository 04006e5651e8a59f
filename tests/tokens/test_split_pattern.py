"""What is read off a pre-tokenizer's expression about where it can split."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.tokens.split_pattern import CharGroup, SplitPattern, UnknownSyntax

LETTERS = CharGroup("a", "z")
DIGITS = CharGroup("0", "9")
COMMA = CharGroup(",", ",")
SPACE = CharGroup(" ", " ")
LINE_END = CharGroup("\n", "\n")


@pytest.mark.parametrize(
    ("pattern", "left", "right", "safe"),
    [
        (r"\p{L}+|\s+", LETTERS, SPACE, True),
        (r"\p{L}+\s*", LETTERS, SPACE, False),
        (r"\p{L}+ ?", LETTERS, SPACE, False),
        (r"\p{L}+ ?", LETTERS, LINE_END, True),
        (r"(?:a|b )+", LETTERS, SPACE, False),
        (r"[^\r\n]+", LETTERS, SPACE, False),
        (r"[^\r\n]+", LETTERS, LINE_END, True),
        (r".+", LETTERS, SPACE, False),
        (r" ?[^\s\p{L}\p{N}]+[\r\n]*", COMMA, SPACE, True),
        (r" ?[^\s\p{L}\p{N}]+[\r\n]*", COMMA, LINE_END, False),
        (r"\p{N}{1,3}|\s", DIGITS, SPACE, True),
        (r"\s+(?!\S)|\p{L}", LETTERS, SPACE, True),
        (r"\p{L}+(?! )", LETTERS, SPACE, False),
        (r"\p{L}+(?= )", LETTERS, SPACE, False),
        (r"(?i:S )", CharGroup("s", "s"), SPACE, False),
        (r"[a-f] ", LETTERS, SPACE, False),
        (r"\p{Han} |\p{L}", LETTERS, SPACE, False),
        (r"\w+", LETTERS, SPACE, False),
        (r"\p{L}*", LETTERS, SPACE, False),
    ],
)
def test_crossing(pattern: str, left: CharGroup, right: CharGroup, safe: bool) -> None:
    assert SplitPattern(pattern).never_crosses(left, right) is safe


@pytest.mark.parametrize(
    ("pattern", "group", "always"),
    [
        (r"\p{L}+", LETTERS, True),
        (r"[^\r\n\p{L}\p{N}]?\p{L}+", LETTERS, True),
        (r"[^\r\n\p{L}\p{N}]?+\p{L}++", LETTERS, True),
        (r"\p{L}?+\p{L}+", LETTERS, False),
        (r"\p{L}{2,}", LETTERS, False),
        (r"\p{N}{1,3}", DIGITS, True),
        (r"[a-f]+", LETTERS, False),
        (r"\p{L}(?!x)", LETTERS, False),
        (r"x\p{L}", LETTERS, False),
        (r"x?\p{L}y*", LETTERS, True),
        (r"\p{Lu}", LETTERS, False),
        (r"\P{L}|\S", LETTERS, True),
    ],
)
def test_matching_alone(pattern: str, group: CharGroup, always: bool) -> None:
    assert SplitPattern(pattern).always_matches(group) is always


@pytest.mark.parametrize(
    "pattern",
    [
        "^a",
        "a$",
        r"\ba",
        r"(?<=a)b",
        r"(a)\1",
        "(?>a)",
        "[[:alpha:]]",
        "[a&&b]",
        "(?i)a",
        "a)",
        "(a",
        "[a",
        r"\xff",
        "a**",
        "(?=ab)c",
        "[]",
    ],
)
def test_other_syntax_is_not_understood(pattern: str) -> None:
    with pytest.raises(UnknownSyntax):
        SplitPattern(pattern)


_ATOMS = st.sampled_from(
    ["a", "b", " ", r"\s", r"\S", "[ab]", "[^a]", "[^ ]", r"(?:a| b)", r"(?!\S)", "(?=a)", "(?! )"]
)
_PATTERNS = st.lists(
    st.lists(
        st.tuples(_ATOMS, st.sampled_from(["", "*", "+", "?", "{1,2}", "{2}", "*?", "++", "?+"])),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=3,
).map(
    lambda choices: "|".join(
        "".join(a if a[:2] == "(?" and a[2] != ":" else a + q for a, q in choice) for choice in choices
    )
)


@given(pattern=_PATTERNS, left=st.text("ab ", max_size=8), right=st.text("ab ", max_size=8))
def test_where_it_says_so_a_cut_changes_no_split(pattern: str, left: str, right: str) -> None:
    """Against Python's own engine, which agrees with the tokenizers' on this little syntax."""
    analysed = SplitPattern(pattern)
    if not (
        analysed.never_crosses(CharGroup("a", "a"), SPACE) and analysed.always_matches(CharGroup("a", "a"))
    ):
        return
    left, right = left + "a", " " + right
    assert pieces(pattern, left) + pieces(pattern, right) == pieces(pattern, left + right)


def pieces(pattern: str, text: str) -> list[str]:
    """Matches and the gaps between them."""
    found = []
    at = 0
    for match in re.finditer(pattern, text):
        found += [text[at : match.start()], match.group()]
        at = match.end()
    return [piece for piece in [*found, text[at:]] if piece]
