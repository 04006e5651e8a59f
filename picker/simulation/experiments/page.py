"""A report as one HTML file: text, tables and charts, with nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Light and dark, ten hues that are told apart by those who see red and green alike.
_LIGHT = (
    "#0b6e99",
    "#d1495b",
    "#3f8f4f",
    "#b7791f",
    "#6b4fa0",
    "#111827",
    "#0fa3b1",
    "#8c5e3c",
    "#c2528b",
    "#7a8b00",
)
_DARK = (
    "#5ab8e6",
    "#ff8a94",
    "#7fd08b",
    "#f2c14e",
    "#b79cf0",
    "#e5e7eb",
    "#67e8f9",
    "#d9a679",
    "#f59ac6",
    "#cddc39",
)


def page(title: str, sections: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A title, and sections of (heading, pieces of HTML)."""
    body = "".join(
        f"<section><h2>{escape(heading)}</h2>{''.join(pieces)}</section>" for heading, pieces in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def items(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def chart(heading: str, svg: str) -> str:
    return f'<div class="chart"><h3>{escape(heading)}</h3>{svg}</div>'


def charts(pieces: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(pieces)}</div>'


def _palette(colours: Sequence[str]) -> str:
    return "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours))


_STYLE = (
    f":root{{color-scheme:light dark;--bg:#fff;--fg:#1f2933;--dim:#667085;--rule:#e4e7ec;{_palette(_LIGHT)}}}"
    "@media(prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e6e9ed;--dim:#98a2b3;--rule:#2b323b;"
    f"{_palette(_DARK)}}}}}"
    "body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:1240px;margin:0 auto;padding:24px 16px}h1{font-size:24px}h2{font-size:19px;margin-top:36px}"
    "h3{font-size:14px;margin:0 0 4px}table{border-collapse:collapse;margin:12px 0;font-variant-numeric:tabular-nums}"
    "section{overflow-x:auto}caption{text-align:left;font-weight:600;padding-bottom:4px}"
    "th,td{padding:3px 12px 3px 0;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}"
    "th{color:var(--dim);font-weight:500}th:first-child,td:first-child{text-align:left}td.best{font-weight:700}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:20px}figure{margin:0}"
    "svg{width:100%;height:auto;display:block}.label{fill:var(--dim);font-size:11px}"
    ".rule{stroke:var(--rule)}.line{fill:none;stroke-width:1.8}.interval{stroke:var(--fg);stroke-width:1.4}"
    ".legend{display:flex;flex-wrap:wrap;gap:2px 14px;list-style:none;margin:4px 0 0;padding:0;font-size:12px}"
    ".key{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}.note{color:var(--dim)}"
    + "".join(
        f".line.c{n}{{stroke:var(--c{n})}}.bar.c{n}{{fill:var(--c{n})}}.key.c{n}{{background:var(--c{n})}}"
        for n in range(len(_LIGHT))
    )
)
