"""A figure that was measured several times, and how far its mean is to be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

# Student's t: the 97.5 % point for 1, 2, ... degrees of freedom; beyond, that of the normal distribution is near.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
_NORMAL = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and half the width of its 95 % confidence interval; None where there is but one value."""

    mean: float
    half_width: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From independent values, by Student's t. Raises ValueError of none."""
        if not values:
            raise ValueError("no values")
        mean = sum(values) / len(values)
        if len(values) == 1:
            return cls(mean)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        degrees = len(values) - 1
        factor = _T[degrees - 1] if degrees <= len(_T) else _NORMAL
        return cls(mean, factor * sqrt(variance / len(values)))

    @property
    def low(self) -> float:
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half_width or 0.0)

    def text(self, form: str = ".2f") -> str:
        """As people read it: `1.23 ±0.04`; percentages where the form is one."""
        mean = format(self.mean, form)
        return mean if self.half_width is None else f"{mean} ±{format(self.half_width, form)}"
