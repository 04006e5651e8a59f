"""Reads one YAML document into plain data and remembers the line of every key.

Stricter than PyYAML's safe loader, and closer to what Dynamo's parser reads: scalars follow the YAML 1.2 core
schema (a class may be called `on`, `1e3` is a number, `12:30` is not), repeated keys are errors, and nesting
and size are bounded, with aliases counted at their full size, so that no document costs more than it looks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from picker.policy.errors import KeyPath, PolicyError, quoted

MAX_DEPTH = 16
MAX_NODES = 100_000

Scalar = str | int | float | bool | None
Data = Scalar | list["Data"] | dict[str, "Data"]

# The C scanner is ten times faster; both give the same events.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_MAX_DIGITS = 64


@dataclass(slots=True)
class Document:
    """Plain data, and the line (from 1) where each path starts."""

    source: str
    data: Data
    lines: dict[tuple[str | int, ...], int] = field(default_factory=dict)

    def error(self, path: KeyPath, problem: str) -> PolicyError:
        """An error at `path`, or where its nearest present parent starts."""
        known = tuple(path)
        while known and known not in self.lines:
            known = known[:-1]
        return PolicyError(self.source, problem, path=path, line=self.lines.get(known))

    def keys(self, path: KeyPath) -> list[str]:
        """The keys of the mapping at `path`; none where there is no mapping."""
        here: Data = self.data
        for part in path:
            if isinstance(here, dict) and part in here:
                here = here[str(part)]
            elif isinstance(here, list) and isinstance(part, int):
                here = here[part]
            else:
                return []
        return list(here) if isinstance(here, dict) else []


def read_document(text: str, source: str) -> Document:
    """Parse `text`. Raises PolicyError with the line if it is not one small, plain YAML document."""
    try:
        return _Reader(text, source).read()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise PolicyError(source, f"not valid YAML: {problem}", line=line) from None
    except yaml.YAMLError as error:
        raise PolicyError(source, f"not valid YAML: {str(error).splitlines()[0]}") from None
    except UnicodeError:
        raise PolicyError(source, "not valid Unicode text") from None


@dataclass(slots=True)
class _Anchored:
    data: Data
    nodes: int


class _Reader:
    """Turns the event stream into data. Recursion is bounded by MAX_DEPTH."""

    def __init__(self, text: str, source: str) -> None:
        self._events: Iterator[yaml.Event] = yaml.parse(text.removeprefix("\ufeff"), Loader=_Loader)
        self._document = Document(source, None)
        self._anchors: dict[str, _Anchored] = {}
        self._nodes = 0

    def read(self) -> Document:
        event = next(self._events)  # stream start
        event = next(self._events)
        if not isinstance(event, yaml.DocumentStartEvent):
            return self._document
        self._document.data = self._node(next(self._events), ())
        next(self._events)  # document end
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            raise self._fail(event, (), "only one YAML document is allowed; a second one starts here")
        return self._document

    def _node(self, event: yaml.Event, path: tuple[str | int, ...]) -> Data:
        self._document.lines.setdefault(path, _line(event))
        if len(path) > MAX_DEPTH:
            raise self._fail(event, path[:MAX_DEPTH], f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path)
        before = self._nodes
        self._count(1, event, path)
        data = self._collection_or_scalar(event, path)
        anchor: str | None = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = _Anchored(data, self._nodes - before)
        return data

    def _collection_or_scalar(self, event: yaml.Event, path: tuple[str | int, ...]) -> Data:
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        tag: str | None = getattr(event, "tag", None)
        if tag and tag not in ("!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise self._fail(event, path, f"the tag {quoted(tag)} has no meaning here")
        return self._mapping(path) if isinstance(event, yaml.MappingStartEvent) else self._sequence(path)

    def _mapping(self, path: tuple[str | int, ...]) -> dict[str, Data]:
        result: dict[str, Data] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._fail(event, path, "a key must be plain text")
            key: str = event.value
            here = (*path, key)
            if key in result:
                first = self._document.lines[here]
                raise self._fail(event, here, f"repeated key; it stands first in line {first}")
            self._document.lines[here] = _line(event)
            result[key] = self._node(next(self._events), here)
        return result

    def _sequence(self, path: tuple[str | int, ...]) -> list[Data]:
        result: list[Data] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            result.append(self._node(event, (*path, len(result))))
        return result

    def _alias(self, event: yaml.AliasEvent, path: tuple[str | int, ...]) -> Data:
        anchored = self._anchors.get(event.anchor or "")
        if anchored is None:
            raise self._fail(event, path, f"*{event.anchor} has no &{event.anchor} before it")
        self._count(anchored.nodes, event, path)
        return anchored.data

    def _count(self, nodes: int, event: yaml.Event, path: tuple[str | int, ...]) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise self._fail(event, path, f"more than {MAX_NODES:,} values, aliases counted in full")

    def _scalar(self, event: yaml.ScalarEvent, path: tuple[str | int, ...]) -> Scalar:
        if event.tag in ("!", "tag:yaml.org,2002:str"):
            return event.value
        if event.tag is not None:
            raise self._fail(event, path, f"the tag {quoted(event.tag)} has no meaning here")
        if not event.implicit[0]:  # quoted or block text
            return event.value
        if _INT.fullmatch(event.value) and len(event.value) > _MAX_DIGITS:
            raise self._fail(event, path, f"a number of more than {_MAX_DIGITS} digits")
        return plain_scalar(event.value)

    def _fail(self, event: yaml.Event, path: KeyPath, problem: str) -> PolicyError:
        line = _line(event)
        return PolicyError(self._document.source, problem, path=path, line=line)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def plain_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar by the YAML 1.2 core schema."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
