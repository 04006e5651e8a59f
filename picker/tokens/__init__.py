"""Tokens: prompts turned into the ids that the engine will compute for them, or into an estimate that says why."""

from picker.tokens.budget import TokenBudget
from picker.tokens.count import BYTES_PER_TOKEN, TOKENS_PER_MEDIA, EstimateReason, TokenCount, estimate
from picker.tokens.service import ANY_MODEL, Tokenizers, TokenStats

__all__ = [
    "ANY_MODEL",
    "BYTES_PER_TOKEN",
    "TOKENS_PER_MEDIA",
    "EstimateReason",
    "TokenBudget",
    "TokenCount",
    "TokenStats",
    "Tokenizers",
    "estimate",
]
