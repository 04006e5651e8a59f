"""Each fuzz target on its good inputs and a few hundred mutations, the same ones every time."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.__main__ import mutated
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_gets_past_the_boundary(name: str) -> None:
    target, dice = TARGETS[name], random.Random(1)
    seeds = list(target.seeds())
    for good in seeds:
        target.run(good)
    for _ in range(300):
        data = mutated(dice.choice(seeds), seeds, target.words, dice)
        try:
            target.run(data)
        except Exception as error:
            error.add_note(f"input: {data[:2000]!r}")
            raise
