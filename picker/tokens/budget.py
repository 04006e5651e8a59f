"""How much work one request's tokens may cost."""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

_MIB = 1 << 20


class TokenBudget(BaseModel):
    """Bounds on tokenizing. Past any of them a request goes on with an estimate, and a counter says why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: PositiveFloat = 1.0
    """Longest a request waits for its tokens, the wait for a worker included."""
    max_bytes: PositiveInt = 8 * _MIB
    """Bytes of prompt text beyond which none is tokenized."""
    inline_bytes: NonNegativeInt = 2048
    """Prompts up to this size are tokenized at once, without a worker thread."""
    threads: PositiveInt = max(1, min(4, (os.cpu_count() or 2) - 1))
    """Worker threads, for all models together."""
    template_seconds: PositiveFloat = 2.0
    """Longest that a chat template may run. It holds the interpreter while it does."""
    template_characters: PositiveInt = 16 * _MIB
    """Characters that a chat template may write."""
    cache_bytes: NonNegativeInt = 256 * _MIB
    """Memory of the tokenization cache, texts and ids. 0: no cache."""
    breaker_timeouts: PositiveInt = 5
    """Timeouts in a row of one model that open its breaker."""
    breaker_seconds: PositiveFloat = 10.0
    """How long an open breaker lets nothing through; after that one more timeout opens it again."""
    load_retry_seconds: NonNegativeFloat = 60.0
    """How long a failed load of a model's tokenizer is remembered before it is tried again."""
