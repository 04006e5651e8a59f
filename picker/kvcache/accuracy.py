"""Predicted against reported cached tokens: does the index still describe the engines?

A wrong chat template, a wrong block size or missed events make no error anywhere: requests are served, only
never where their prefix is. The engine's own figure (`cached_tokens` of a response's usage) shows it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """The likely reason that predictions and reports differ."""

    NONE = "none"
    TOKENS = "tokens"
    BLOCK_SIZE = "block_size"
    NO_REUSE = "no_reuse"
    OVER = "over"
    UNDER = "under"


class Verdict(NamedTuple):
    """What a model's latest responses say. `ratio` is predicted to reported tokens, inf when none were
    reported.
    """

    cause: Cause
    ratio: float
    explanation: str


class Sample(NamedTuple):
    """One response, in tokens. `block_size` is what the prediction for its endpoint was made with."""

    predicted: int
    reported: int
    block_size: int


@dataclass(slots=True)
class AccuracyStats:
    """Monotonic counters. `absolute_error` and the tokens are summed over all samples."""

    samples: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    absolute_error: int = 0
    verdicts: dict[str, int] = field(default_factory=lambda: {cause.value: 0 for cause in Cause})


@dataclass(slots=True)
class _Model:
    samples: deque[Sample]
    verdict: Verdict | None = None


class AccuracyTracker:
    """Watches the last `window` informative responses per model, for at most `max_models` models.

    A response is informative when a cached token was predicted or reported. Nothing is said before
    `min_samples` of them. `tolerance` is the accepted relative difference of the sums.
    """

    def __init__(
        self, *, window: int = 128, min_samples: int = 16, tolerance: float = 0.2, max_models: int = 1024
    ) -> None:
        self.stats = AccuracyStats()
        self._window = window
        self._min_samples = min_samples
        self._tolerance = tolerance
        self._max_models = max_models
        self._models: OrderedDict[str, _Model] = OrderedDict()

    def observe(self, model: str, *, predicted: int, reported: int, block_size: int) -> Verdict | None:
        """Take one response in. Returns the model's verdict when its cause has changed: the moment to log it."""
        self.stats.samples += 1
        self.stats.predicted_tokens += predicted
        self.stats.reported_tokens += reported
        self.stats.absolute_error += abs(predicted - reported)
        if not predicted and not reported:
            return None
        state = self._state(model)
        state.samples.append(Sample(predicted, reported, block_size))
        if len(state.samples) < self._min_samples:
            return None
        verdict = judge(state.samples, self._tolerance)
        before = state.verdict.cause if state.verdict else Cause.NONE
        state.verdict = verdict
        if verdict.cause is before:
            return None
        self.stats.verdicts[verdict.cause] += 1
        return verdict

    def verdict(self, model: str) -> Verdict | None:
        """The latest verdict; None before there are enough samples."""
        state = self._models.get(model)
        return state.verdict if state else None

    def _state(self, model: str) -> _Model:
        state = self._models.get(model)
        if state is None:
            state = self._models[model] = _Model(deque(maxlen=self._window))
            if len(self._models) > self._max_models:
                self._models.popitem(last=False)
        self._models.move_to_end(model)
        return state


def judge(samples: Sequence[Sample], tolerance: float) -> Verdict:
    """The most likely cause of the difference over these samples, which must not be empty."""
    predicted = sum(sample.predicted for sample in samples)
    reported = sum(sample.reported for sample in samples)
    ratio = predicted / reported if reported else math.inf
    if not predicted:
        return Verdict(
            Cause.TOKENS,
            ratio,
            f"the engine reports {reported} cached tokens over {len(samples)} responses and none was predicted: "
            "our token ids differ from the engine's (chat template, tokenizer, adapter name or cache salt)",
        )
    if not reported:
        return Verdict(
            Cause.NO_REUSE,
            ratio,
            f"{predicted} cached tokens were predicted over {len(samples)} responses and the engine used none: "
            "its prefix cache is off, or its events are another engine's",
        )
    if size := _other_block_size(samples):
        return Verdict(
            Cause.BLOCK_SIZE,
            ratio,
            f"reported cached tokens come in multiples of {size}, and the block size is taken to be "
            f"{samples[-1].block_size}: the engine's blocks probably have {size} tokens",
        )
    if ratio > 1 + tolerance:
        return Verdict(
            Cause.OVER,
            ratio,
            f"{ratio:.2f} times the reported tokens are predicted: removals are being missed",
        )
    if ratio < 1 - tolerance:
        return Verdict(
            Cause.UNDER,
            ratio,
            f"{ratio:.2f} times the reported tokens are predicted: stores are being missed",
        )
    return Verdict(Cause.NONE, ratio, "predicted and reported tokens agree")


def _other_block_size(samples: Sequence[Sample]) -> int | None:
    """The engine's block size where its reports cannot come from the assumed one, or hardly.

    An engine reports whole blocks, so its block size divides the greatest common divisor of its reports.
    Smaller than assumed shows at once; larger shows only over several different values, and only matters
    where the predictions are off.
    """
    assumed = {sample.block_size for sample in samples}
    if len(assumed) != 1:
        return None
    size = assumed.pop()
    values = {sample.reported for sample in samples if sample.reported}
    divisor = math.gcd(*values)
    if divisor % size:
        return divisor
    wrong = sum(sample.predicted != sample.reported for sample in samples)
    if divisor > size and len(values) >= 4 and wrong * 4 >= len(samples):
        return divisor
    return None
