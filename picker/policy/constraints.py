"""Taints, tolerations and label selectors, as Kubernetes shapes them.

They are the vocabulary that policy classes, endpoints and requests share, so they live in the lowest room.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_TAINT = re.compile(r"(?P<key>[A-Za-z0-9](?:[A-Za-z0-9_./-]*[A-Za-z0-9])?)(?:=(?P<value>[A-Za-z0-9_.-]*))?")


class TaintEffect(StrEnum):
    """What a taint does to a request that does not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True, slots=True, order=True)
class Taint:
    """A mark on an endpoint: it repels every request that does not tolerate it."""

    key: str
    value: str = ""
    effect: TaintEffect = TaintEffect.NO_SCHEDULE

    @classmethod
    def parse(cls, text: str) -> Taint:
        """Read `key[=value]:effect`, as kubectl writes it. Raises ValueError that says what is wrong."""
        body, colon, effect = text.strip().rpartition(":")
        match = _TAINT.fullmatch(body)
        if not colon or match is None:
            raise ValueError(f"taint {text!r} must read key[=value]:effect")
        if effect not in {member.value for member in TaintEffect}:
            raise ValueError(f"taint {text!r}: effect must be one of {', '.join(TaintEffect)}")
        return cls(match["key"], match["value"] or "", TaintEffect(effect))

    def __str__(self) -> str:
        value = f"={self.value}" if self.value else ""
        return f"{self.key}{value}:{self.effect}"


@dataclass(frozen=True, slots=True, order=True)
class Toleration:
    """Leave to use endpoints with a taint.

    An empty key tolerates every key, `value` None every value (operator Exists), `effect` None every effect.
    """

    key: str = ""
    value: str | None = None
    effect: TaintEffect | None = None

    @classmethod
    def parse(cls, text: str) -> Toleration:
        """Read `key[=value][:effect]`; `*` tolerates everything. Raises ValueError that says why not."""
        text = text.strip()
        if text == "*":
            return cls()
        body, colon, effect = text.rpartition(":")
        match = _TAINT.fullmatch(body if colon else text)
        if match is None:
            raise ValueError(f"toleration {text!r} must read key[=value][:effect] or *")
        if colon and effect not in {member.value for member in TaintEffect}:
            raise ValueError(f"toleration {text!r}: effect must be one of {', '.join(TaintEffect)}")
        return cls(match["key"], match["value"], TaintEffect(effect) if colon else None)

    def __str__(self) -> str:
        """As `parse` reads it."""
        value = "" if self.value is None else f"={self.value}"
        effect = f":{self.effect}" if self.effect else ""
        return f"{self.key}{value}{effect}" or "*"

    def tolerates(self, taint: Taint) -> bool:
        return (
            (not self.key or self.key == taint.key)
            and (self.value is None or self.value == taint.value)
            and (self.effect is None or self.effect == taint.effect)
        )


@dataclass(frozen=True, slots=True)
class LabelIn:
    """A label that must have one of the values; or_absent: or not be there at all."""

    key: str
    values: frozenset[str]
    or_absent: bool = False

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        return self.or_absent if value is None else value in self.values


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """Labels that an endpoint must carry, plain equality. Empty selects every endpoint."""

    match_labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> LabelSelector:
        return cls(tuple(sorted(labels.items())))

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.match_labels)

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.match_labels)
