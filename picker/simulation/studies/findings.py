"""What a study has found, ready to be shown, written down or drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from picker.simulation.experiments.page import chart, charts, items, page
from picker.simulation.experiments.tables import Table

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that should be so, and whether it was found to be. `found` is the figure in words."""

    text: str
    found: str
    holds: bool

    def line(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.text}: {self.found}"


@dataclass(slots=True)
class Findings:
    """`facts` say what was done, `notes` what is to be known when reading it; charts are (heading, SVG)."""

    title: str
    facts: Sequence[str]
    claims: Sequence[Claim]
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    charts: Sequence[tuple[str, str]] = ()
    data: Any = field(default_factory=dict)

    def markdown(self) -> str:
        parts = [_list(self.facts)]
        parts += [f"{table.title}:\n\n{table.markdown()}" for table in self.tables]
        parts += [_list([claim.line() for claim in self.claims])]
        if self.notes:
            parts.append("What does not fit, and what to bear in mind:\n\n" + _list(self.notes))
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        sections = [
            ("What was done", [items(self.facts)]),
            ("Claims", [items([claim.line() for claim in self.claims])]),
            ("Figures", [table.html() for table in self.tables]),
            ("Charts", [charts([chart(heading, svg) for heading, svg in self.charts])]),
            ("What does not fit, and what to bear in mind", [items(self.notes)]),
        ]
        return page(self.title, [section for section in sections if section[1] != [items([])]])

    def as_data(self) -> dict[str, Any]:
        claims = [asdict(claim) for claim in self.claims]
        return {
            "title": self.title,
            "facts": [*self.facts],
            "claims": claims,
            "notes": [*self.notes],
            **self.data,
        }


def _list(texts: Sequence[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)
