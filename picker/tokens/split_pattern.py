"""What can be proven about the regular expressions that pre-tokenizers split text with.

The question is where a text can be cut so that both parts are split as they are in the whole. Take two adjacent
characters l and r. If no match can take l and then r, if no lookahead can tell r from the end of the text, and if l
alone can always be matched, then

- every match that begins before the cut ends at or before it, in the whole text and in the left part alike: the ways to
  match are the same in both, so the one that the engine prefers is too;
- a match begins or a gap ends exactly at the cut, and since nothing looks back, the right part goes on alike.

Which characters can follow each other in a match is read off the expression by Glushkov's construction: a position per
character class, and the pairs of positions that can be neighbours. Where the construction takes in too much (counted
repeats, lazy and possessive ones), the answer errs towards "cannot be cut". Syntax that is not understood is an error.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn


class UnknownSyntax(Exception):
    """The expression uses something that the analysis does not cover."""


@dataclass(frozen=True, slots=True)
class CharGroup:
    """A range of characters, ends included, that share one general category and either are or are not white space."""

    low: str
    high: str

    def __iter__(self) -> Iterator[str]:
        return map(chr, range(ord(self.low), ord(self.high) + 1))

    @property
    def category(self) -> str:
        return unicodedata.category(self.low)

    @property
    def is_space(self) -> bool:
        return self.low.isspace()


@dataclass(frozen=True, slots=True)
class CharClass:
    """A set of characters: ranges, general categories (`L`, `Nd`), `space`; each may be negated, the whole as well."""

    items: tuple[tuple[str, bool], ...]
    negated: bool = False

    def covers(self, group: CharGroup) -> bool | None:
        """True: every character of the group is in the class, False: none is, None: cannot say."""
        answers = [self._item_covers(item, negated, group) for item, negated in self.items]
        covered = True if True in answers else None if None in answers else False
        return covered if covered is None else covered != self.negated

    @staticmethod
    def _item_covers(item: str, negated: bool, group: CharGroup) -> bool | None:
        if len(item) == 3 and item[1] == "-":
            low, high = item[0], item[2]
            if high < group.low or low > group.high:
                return negated
            return not negated if low <= group.low and group.high <= high else None
        if item == "space":
            return group.is_space != negated
        if item == "?":
            return None
        return group.category.startswith(item) != negated


@dataclass(slots=True)
class _Part:
    """A piece of the expression. Positions are indices into the pattern's classes."""

    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    may_be_empty: bool = True
    must_allow_empty: bool = True
    """Unlike `may_be_empty`, also false where it depends on a lookahead."""
    alone: dict[int, frozenset[int]] = field(default_factory=dict)
    """Positions that suffice for a match, with the possessive ones that could take the character away first."""


class SplitPattern:
    """An analysed expression. Raises UnknownSyntax."""

    def __init__(self, pattern: str) -> None:
        self._classes: list[CharClass] = []
        self._follow: set[tuple[int, int]] = set()
        # What a lookahead tests, and the positions that can stand before it (None: anything).
        self._lookaheads: list[tuple[CharClass, frozenset[int] | None]] = []
        self._text = pattern
        self._at = 0
        self._ignore_case = False
        self._whole = self._alternatives()
        if self._at != len(pattern):
            self._unknown()

    def never_crosses(self, left: CharGroup, right: CharGroup) -> bool:
        """Whether no match takes a character of `left` and then one of `right`, nor can tell the latter from the end
        of the text."""
        if self._whole.may_be_empty:
            return False
        takes_left = {at for at, kind in enumerate(self._classes) if kind.covers(left) is not False}
        takes_right = {at for at, kind in enumerate(self._classes) if kind.covers(right) is not False}
        if any(before in takes_left and after in takes_right for before, after in self._follow):
            return False
        return all(
            tested.covers(right) is False or (before is not None and takes_left.isdisjoint(before))
            for tested, before in self._lookaheads
        )

    def always_matches(self, group: CharGroup) -> bool:
        """Whether each character of the group is part of some match, wherever it stands."""
        return not self._whole.may_be_empty and any(
            self._classes[at].covers(group) is True
            and all(self._classes[other].covers(group) is False for other in blockers)
            for at, blockers in self._whole.alone.items()
        )

    # A parser for the subset of Oniguruma's syntax that tokenizers use.

    def _unknown(self) -> NoReturn:
        raise UnknownSyntax(f"position {self._at} of {self._text[:80]!r}")

    def _peek(self, length: int = 1) -> str:
        return self._text[self._at : self._at + length]

    def _take(self) -> str:
        if self._at >= len(self._text):
            self._unknown()
        self._at += 1
        return self._text[self._at - 1]

    def _skip(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        if found:
            self._at += len(text)
        return found

    def _alternatives(self) -> _Part:
        choices = [self._sequence()]
        while self._skip("|"):
            choices.append(self._sequence())
        whole = _Part(may_be_empty=False, must_allow_empty=False)
        for choice in choices:
            whole.first |= choice.first
            whole.last |= choice.last
            whole.may_be_empty |= choice.may_be_empty
            whole.must_allow_empty |= choice.must_allow_empty
            for at, blockers in choice.alone.items():
                whole.alone[at] = blockers
        return whole

    def _sequence(self) -> _Part:
        done = _Part()
        blockers: frozenset[int] = frozenset()
        while self._at < len(self._text) and self._peek() not in "|)":
            if self._peek(3) in ("(?=", "(?!"):
                self._lookahead(done)
                done.must_allow_empty = False
                done.alone = {}
                continue
            part, possessive = self._repeated()
            self._follow |= {(before, after) for before in done.last for after in part.first}
            alone = dict(done.alone) if part.must_allow_empty else {}
            if done.must_allow_empty:
                alone |= {at: others | blockers for at, others in part.alone.items()}
            if possessive:
                blockers |= part.first
            done = _Part(
                first=done.first | part.first if done.may_be_empty else done.first,
                last=part.last | done.last if part.may_be_empty else part.last,
                may_be_empty=done.may_be_empty and part.may_be_empty,
                must_allow_empty=done.must_allow_empty and part.must_allow_empty,
                alone=alone,
            )
        return done

    def _lookahead(self, before: _Part) -> None:
        self._at += 3
        inside = self._alternatives()
        if (
            not self._skip(")")
            or inside.may_be_empty
            or len(inside.first) != 1
            or inside.first != inside.last
        ):
            self._unknown()
        (position,) = inside.first
        known = None if before.may_be_empty else frozenset(before.last)
        self._lookaheads.append((self._classes[position], known))

    def _repeated(self) -> tuple[_Part, bool]:
        """An atom with its quantifier, and whether that is possessive."""
        part = self._atom()
        least, most = 1, 1
        if self._skip("*"):
            least, most = 0, 2
        elif self._skip("+"):
            least, most = 1, 2
        elif self._skip("?"):
            least, most = 0, 1
        elif self._peek() == "{":
            least, most = self._counts()
        else:
            return part, False
        possessive = self._skip("+")
        if not possessive:
            self._skip("?")
        if self._peek() in ("*", "+", "?", "{"):
            self._unknown()
        if most > 1:
            self._follow |= {(before, after) for before in part.last for after in part.first}
        if least == 0:
            part.may_be_empty = part.must_allow_empty = True
        if least > 1:
            part.alone = {}
        return part, possessive

    def _counts(self) -> tuple[int, int]:
        body, brace, _ = self._text[self._at + 1 :].partition("}")
        low, comma, high = body.partition(",")
        if not brace or not (low or "0").isdecimal() or not (high or "0").isdecimal() or not (low or high):
            self._unknown()
        self._at += len(body) + 2
        least = int(low or "0")
        return least, (int(high) if high else 2**31) if comma else least

    def _atom(self) -> _Part:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._position(self._bracket())
        if char == ".":
            return self._position(CharClass((("\n-\n", False),), negated=True))
        if char == "\\":
            return self._position(CharClass((self._escape(),)))
        if char in "^$*+?{}])":
            self._unknown()
        return self._position(CharClass(self._literal(char)))

    def _position(self, char_class: CharClass) -> _Part:
        at = len(self._classes)
        self._classes.append(char_class)
        return _Part({at}, {at}, False, False, {at: frozenset()})

    def _group(self) -> _Part:
        outer = self._ignore_case
        if self._skip("?i:"):
            self._ignore_case = True
        elif not self._skip("?:") and self._peek() == "?":
            self._unknown()
        part = self._alternatives()
        if not self._skip(")"):
            self._unknown()
        self._ignore_case = outer
        return part

    def _literal(self, char: str) -> tuple[tuple[str, bool], ...]:
        forms = {char, char.lower(), char.upper()} if self._ignore_case else {char}
        return tuple((f"{form}-{form}", False) for form in sorted(forms) if len(form) == 1)

    def _escape(self) -> tuple[str, bool]:
        char = self._take()
        if char in _ESCAPED:
            return f"{_ESCAPED[char]}-{_ESCAPED[char]}", False
        if char in _NAMED:
            return _NAMED[char]
        if char in "pP":
            return self._property(char == "P")
        if char.isalnum():
            self._unknown()
        return f"{char}-{char}", False

    def _property(self, negated: bool) -> tuple[str, bool]:
        if not self._skip("{"):
            self._unknown()
        name, brace, _ = self._text[self._at :].partition("}")
        if not brace:
            self._unknown()
        self._at += len(name) + 1
        negated ^= name.startswith("^")
        name = name.lstrip("^")
        # Scripts and other properties: whether a character has them is not known here. Nor is the case, if ignored.
        known = name in _CATEGORIES and not (self._ignore_case and name in ("Lu", "Ll", "Lt"))
        return (name if known else "?"), negated

    def _bracket(self) -> CharClass:
        negated = self._skip("^")
        items: list[tuple[str, bool]] = []
        while not self._skip("]"):
            if self._peek() == "[" or self._peek(2) == "&&":
                self._unknown()
            item = self._bracket_item()
            if self._peek() == "-" and self._peek(2) != "-]":
                self._at += 1
                high, _ = self._bracket_item()
                if len(item[0]) != 3 or len(high) != 3 or item[0][1] != "-":
                    self._unknown()
                item = (f"{item[0][0]}-{high[2]}", False)
            items.append(item)
            if self._ignore_case and len(item[0]) == 3:
                # The other case of the range: exact for single letters, "cannot say" for anything wider.
                low, high = item[0][0], item[0][2]
                items.extend(self._literal(low) if low == high else (("?", False),))
        if not items:
            self._unknown()
        return CharClass(tuple(items), negated)

    def _bracket_item(self) -> tuple[str, bool]:
        char = self._take()
        return self._escape() if char == "\\" else (f"{char}-{char}", False)


_ESCAPED = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v"}
# Word characters are more than one category; as far as they go they are not needed.
_NAMED = {"s": ("space", False), "S": ("space", True), "d": ("Nd", False), "D": ("Nd", True)}
_NAMED |= {"w": ("?", False), "W": ("?", True)}
_CATEGORIES = frozenset("LMNPSZC") | {
    major + minor
    for major, minors in {
        "L": "ultmo",
        "M": "nce",
        "N": "dlo",
        "P": "cdseifo",
        "S": "mcko",
        "Z": "slp",
        "C": "cfson",
    }.items()
    for minor in minors
}
