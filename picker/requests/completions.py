"""Completions and embeddings: a text, token ids, or a batch of either."""

from __future__ import annotations

from array import array
from typing import Any

from msgspec import UNSET, Struct

from picker.requests.chat import truncation_of
from picker.requests.errors import BadRequest, OverLimit
from picker.requests.limits import BodyLimits
from picker.requests.prompts import Prompt, TextPrompts, TokenPrompts, Truncation


class CompletionBody(Struct):
    """The fields of a completions body that decide its prompt and its routing."""

    model: Any = None
    prompt: Any = UNSET
    prompt_embeds: Any = None
    suffix: Any = None
    stream: Any = False
    max_tokens: Any = None
    cache_salt: Any = None
    priority: Any = None
    add_special_tokens: Any = True
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None


class EmbeddingBody(Struct):
    """The fields of an embeddings body that decide its prompt and its routing."""

    model: Any = None
    input: Any = UNSET
    messages: Any = UNSET
    stream: Any = False
    max_tokens: Any = None
    cache_salt: Any = None
    priority: Any = None
    add_special_tokens: Any = True
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None


def completion_prompt(body: CompletionBody, limits: BodyLimits) -> Prompt | None:
    """The prompt of a completions body; None where only the engine knows it. Raises BadRequest."""
    if body.prompt in (UNSET, None) and body.prompt_embeds is not None:
        return None
    if body.suffix is not None and body.suffix != "":
        # Fill-in-the-middle text is composed by the engine, per model.
        _ = prompts_of(body.prompt, "prompt", limits)
        return None
    return prompts_of(
        body.prompt,
        "prompt",
        limits,
        add_special_tokens=bool(body.add_special_tokens),
        truncation=truncation_of(body.truncate_prompt_tokens, body.truncation_side),
    )


def prompts_of(
    value: Any,
    param: str,
    limits: BodyLimits,
    *,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
) -> TextPrompts | TokenPrompts:
    """Read a string, a list of strings, a list of token ids or a list of such lists. Raises BadRequest."""
    if isinstance(value, str):
        return TextPrompts((value,), add_special_tokens, truncation)
    if not isinstance(value, list):
        raise BadRequest(f"{param} must be a string, a list of strings or token ids", param=param)
    if not value:
        raise BadRequest(f"{param} must not be empty", param=param)
    first = value[0]
    if isinstance(first, int):
        return TokenPrompts(_token_prompts([value], param, limits), truncation)
    if len(value) > limits.max_prompts:
        raise OverLimit(f"{param} holds more than {limits.max_prompts} prompts", "max_prompts", param=param)
    if isinstance(first, list):
        return TokenPrompts(_token_prompts(value, param, limits), truncation)
    if not all(isinstance(item, str) for item in value):
        raise _mixed(param)
    return TextPrompts(tuple(value), add_special_tokens, truncation)


def _token_prompts(prompts: list[Any], param: str, limits: BodyLimits) -> tuple[array[int], ...]:
    if not all(isinstance(ids, list) for ids in prompts):
        raise _mixed(param)
    if not all(prompts):
        raise BadRequest(f"{param} holds an empty list of token ids", param=param)
    if sum(map(len, prompts)) > limits.max_prompt_tokens:
        raise OverLimit(
            f"{param} holds more than {limits.max_prompt_tokens} token ids", "max_prompt_tokens", param=param
        )
    try:
        return tuple(array("I", ids) for ids in prompts)
    except (TypeError, OverflowError):
        raise BadRequest(f"{param} token ids must be integers from 0 to 2^32 - 1", param=param) from None


def _mixed(param: str) -> BadRequest:
    return BadRequest(
        f"{param} must hold only strings, only token ids or only lists of token ids", param=param
    )
