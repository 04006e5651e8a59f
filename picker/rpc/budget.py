"""How much may be held in memory for clients. No IO."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BudgetStats:
    held_bytes: int = 0
    peak_bytes: int = 0
    refusals: int = 0


@dataclass(slots=True)
class ByteBudget:
    """The bytes that all calls together may hold."""

    max_bytes: int
    stats: BudgetStats = field(default_factory=BudgetStats)

    def take(self, size: int) -> bool:
        """Reserve `size` bytes; False, and nothing reserved, when they do not fit."""
        stats = self.stats
        held = stats.held_bytes + size
        if held > self.max_bytes:
            stats.refusals += 1
            return False
        stats.held_bytes = held
        if held > stats.peak_bytes:
            stats.peak_bytes = held
        return True

    def give_back(self, size: int) -> None:
        self.stats.held_bytes -= size
