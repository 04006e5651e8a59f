"""Which model a request is served by, where that is not the one that it names: rewriting, and splits by weight.

The first rule that names the request's model decides; where none does, the first one that names no model. A request
without a model is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints, field_validator
from pydantic.dataclasses import dataclass as validated

# As long as a request's own model name may be by default.
Model = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=256)]


@validated(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RewriteTarget:
    """One entry of `targets`."""

    model: Model = Field(description="The name that the request goes on with.")
    weight: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Its part of the rule's requests, against the other weights. All have one, or none.",
    )


@validated(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RewriteRule:
    """One entry of `model_rewrites`."""

    match: tuple[Model, ...] = Field(
        default=(),
        description="Names of models whose requests it is for. Without any: for all that no other rule names.",
    )
    targets: tuple[RewriteTarget, ...] = Field(
        min_length=1,
        max_length=64,
        description="The models that serve them; each request goes to one, at random.",
    )

    @field_validator("targets")
    @classmethod
    def _all_or_none(cls, targets: tuple[RewriteTarget, ...]) -> tuple[RewriteTarget, ...]:
        weighted = sum(target.weight is not None for target in targets)
        if weighted not in (0, len(targets)):
            raise ValueError("either all targets have a weight or none has")
        return targets


@dataclass(frozen=True, slots=True)
class Split:
    """Models and, with each, the sum of the weights up to and with its own."""

    models: tuple[str, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, targets: Iterable[RewriteTarget]) -> Split:
        targets = tuple(targets)
        return cls(
            tuple(target.model for target in targets),
            tuple(accumulate(target.weight or 1 for target in targets)),
        )

    def choose(self, draw: float) -> str:
        """The model for a number that was drawn from [0, 1)."""
        point = draw * self.bounds[-1]
        return next(model for model, bound in zip(self.models, self.bounds, strict=True) if point < bound)


@dataclass(frozen=True, slots=True)
class ModelRewrites:
    """All rules, plain: the split of each model that a rule names, and that of the others."""

    named: dict[str, Split] = field(default_factory=dict)
    others: Split | None = None

    @classmethod
    def of(cls, rules: Iterable[RewriteRule]) -> ModelRewrites:
        named: dict[str, Split] = {}
        others: Split | None = None
        for rule in rules:
            split = Split.of(rule.targets)
            for model in rule.match:
                named.setdefault(model, split)
            if not rule.match and others is None:
                others = split
        return cls(named, others)

    def then(self, later: ModelRewrites) -> ModelRewrites:
        """These rules, and where they say nothing, the later ones."""
        return ModelRewrites(later.named | self.named, self.others or later.others)

    def split(self, model: str) -> Split | None:
        """What the requests of a model are split between; None: they stay what they are."""
        return self.named.get(model, self.others)
