"""Charts as SVG text: lines and grouped bars, drawn with nothing but this file. Colours are the page's variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

from picker.simulation.experiments.confidence import Estimate

_WIDTH, _HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 42
COLOURS = 10


@dataclass(frozen=True, slots=True)
class Axis:
    """Values to places on the page, between `start` and `end` pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high, value = (self._scaled(each) for each in (self.low, self.high, value))
        part = (value - low) / (high - low) if high > low else 0.0
        return self.start + part * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return log10(max(value, 1e-9)) if self.log else value

    def ticks(self) -> list[float]:
        if self.log:
            return [10.0**power for power in range(round(log10(self.low)), round(log10(self.high)) + 1)]
        step = _round_step((self.high - self.low) / 5)
        first = ceil(self.low / step - 1e-9)
        return [step * number for number in range(first, floor(self.high / step + 1e-9) + 1)]


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str, *, log_x: bool = False
) -> str:
    """One line a series. With `log_x` every x must be above 0."""
    points = [point for each in series.values() for point in each if all(map(isfinite, point))]
    if not points:
        return _EMPTY
    across = _horizontal([x for x, _ in points], log_x)
    up = _vertical([y for _, y in points])
    parts = [_grid(across, up, x_label, y_label)]
    for number, each in enumerate(series.values()):
        path = " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in each)
        parts.append(f'<polyline class="line c{number % COLOURS}" points="{path}"/>')
    return _figure(parts, list(series))


def bars(
    groups: Mapping[str, Mapping[str, Estimate]],
    y_label: str,
    text: Callable[[float], str] = lambda value: f"{value:.3g}",
) -> str:
    """A bar for each name in each group, with its interval; the names are the legend."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    if not names:
        return _EMPTY
    up = _vertical([0.0, *(value.high for group in groups.values() for value in group.values())])
    across = Axis(0.0, len(groups), _LEFT, _WIDTH - _RIGHT)
    parts = [_rules(up, y_label)]
    width = (across.end - across.start) / len(groups)
    bar = width * 0.8 / len(names)
    for place, (label, group) in enumerate(groups.items()):
        left = across.place(place) + width * 0.1
        parts.append(_text(left + width * 0.4, _HEIGHT - _BOTTOM + 16, label, "middle"))
        for number, name in enumerate(names):
            if name in group:
                parts.append(
                    _bar(left + number * bar, bar, group[name], up, number, f"{label}, {name}", text)
                )
    return _figure(parts, names)


_EMPTY = '<p class="note">Nothing to draw.</p>'


def _bar(
    left: float,
    width: float,
    value: Estimate,
    up: Axis,
    number: int,
    title: str,
    text: Callable[[float], str],
) -> str:
    top, base = up.place(value.mean), up.place(0.0)
    middle = left + width / 2
    interval = (
        f'<line class="interval" x1="{middle:.1f}" x2="{middle:.1f}" y1="{up.place(max(0.0, value.low)):.1f}"'
        f' y2="{up.place(value.high):.1f}"/>'
        if value.half_width is not None
        else ""
    )
    return (
        f'<g><title>{escape(title)}: {escape(text(value.mean))}</title><rect class="bar c{number % COLOURS}"'
        f' x="{left:.1f}" y="{top:.1f}" width="{max(width - 1, 1):.1f}" height="{max(base - top, 0):.1f}"/>'
        f"{interval}</g>"
    )


def _horizontal(values: Sequence[float], log: bool) -> Axis:
    low, high = min(values), max(values)
    if log:
        low, high = 10.0 ** floor(log10(max(low, 1e-9))), 10.0 ** ceil(log10(max(high, 1e-9)))
        high = high if high > low else low * 10
    return Axis(low, high if high > low else low + 1, _LEFT, _WIDTH - _RIGHT, log)


def _vertical(values: Sequence[float]) -> Axis:
    high = max(values)
    step = _round_step(high / 5) if high > 0 else 0.2
    return Axis(0.0, step * max(1, ceil(high / step - 1e-9)), _HEIGHT - _BOTTOM, _TOP)


def _grid(across: Axis, up: Axis, x_label: str, y_label: str) -> str:
    parts = [_rules(up, y_label)]
    for tick in across.ticks():
        x = across.place(tick)
        parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 14, f"{tick:g}", "middle"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label, "middle"))
    return "".join(parts)


def _rules(up: Axis, label: str) -> str:
    parts = []
    for tick in up.ticks():
        y = up.place(tick)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text class="label" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(label)}</text>"
    )
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(parts: Sequence[str], names: Sequence[str]) -> str:
    legend = "".join(
        f'<li><i class="key c{number % COLOURS}"></i>{escape(name)}</li>' for number, name in enumerate(names)
    )
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, ... from a rough step up."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** floor(log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
