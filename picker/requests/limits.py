"""How much a request may hold before it is refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PositiveInt

_MIB = 1 << 20


class BodyLimits(BaseModel):
    """Bounds on one request's body. Passing a size bound is 413, any other bound 400."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_body_bytes: PositiveInt = 16 * _MIB
    """Bytes of the body as received."""
    max_expanded_bytes: PositiveInt = 32 * _MIB
    """Bytes of a compressed body after decoding."""
    max_json_depth: PositiveInt = 128
    """Nesting of arrays and objects."""
    max_json_values: PositiveInt = 250_000
    """Arrays, objects and strings in a body, keys among them: what reading it costs in memory and time."""
    max_model_length: PositiveInt = 256
    """Characters of the model name."""
    max_prompts: PositiveInt = 2048
    """Prompts in one batch (completions, embeddings)."""
    max_prompt_tokens: PositiveInt = 4_000_000
    """Token ids in all prompts of a request that is given as ids."""
    max_messages: PositiveInt = 8192
    """Messages of a chat, or input items of a response."""
    max_tools: PositiveInt = 2048
    """Tools offered to the model."""
    max_cache_salt_length: PositiveInt = 1024
    """Characters of `cache_salt`."""
