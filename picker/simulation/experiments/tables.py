"""Tables that can be shown in a terminal, in Markdown and in HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from rich.table import Table as RichTable


@dataclass(slots=True)
class Table:
    """The first column names the row; the others are numbers as text. `best` marks a cell by (row, column)."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    best: set[tuple[int, int]] = field(default_factory=set)

    def mark_lowest(self, column: int, values: Sequence[float]) -> None:
        """Mark in a column the row (or rows) with the lowest value."""
        self.best |= {(row, column) for row, value in enumerate(values) if value == min(values)}

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left", box=None, header_style="dim")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row, cells in enumerate(self.rows):
            table.add_row(
                *(
                    f"[b]{cell}[/b]" if (row, column) in self.best else cell
                    for column, cell in enumerate(cells)
                )
            )
        return table

    def markdown(self) -> str:
        lines = [f"| {' | '.join(self.columns)} |", f"|---|{'---:|' * (len(self.columns) - 1)}"]
        for row, cells in enumerate(self.rows):
            marked = (
                f"**{cell}**" if (row, column) in self.best else cell for column, cell in enumerate(cells)
            )
            lines.append(f"| {' | '.join(marked)} |")
        return "\n".join(lines)

    def html(self) -> str:
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        body = "".join(
            "<tr>"
            + "".join(
                f'<td class="best">{escape(cell)}</td>'
                if (row, column) in self.best
                else f"<td>{escape(cell)}</td>"
                for column, cell in enumerate(cells)
            )
            + "</tr>"
            for row, cells in enumerate(self.rows)
        )
        caption = escape(self.title)
        return (
            f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )
