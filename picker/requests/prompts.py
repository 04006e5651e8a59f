"""What a request asks the model to read, in the shapes that tokenizing needs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field


class Truncation(Struct, frozen=True):
    """Keep only `keep` token ids: the last ones, or the first ones where `right` is set.

    `keeps_frame`: the tokenizer cuts, so what its post-processor adds (BOS and the like) counts, but stays. A
    request that names a side has the ready ids cut.
    """

    keep: int
    right: bool = False
    keeps_frame: bool = True


class TextPrompts(Struct, frozen=True):
    """One or more plain texts; the engine makes a request of each.

    `add_special_tokens`: whether the tokenizer's post-processor runs (BOS and the like).
    """

    texts: tuple[str, ...]
    add_special_tokens: bool = True
    truncation: Truncation | None = None


class TokenPrompts(Struct, frozen=True):
    """One or more prompts given as token ids (unsigned 32 bit), used as they are."""

    prompts: tuple[array[int], ...]
    truncation: Truncation | None = None


class ChatPrompt(Struct, frozen=True):
    """A conversation for the model's chat template.

    `messages` and `tools` are in the shape of the chat completions API, as the engine hands them to its template.
    `template_kwargs` holds what the request adds for the template (its own `chat_template_kwargs`, `documents`,
    `reasoning_effort`, ...). `own_template`: the request brings a template, which only a trusting engine would use.
    `messages_api`: from the Messages API, for which the engine fits system messages and disabled thinking to
    what the template accepts.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    own_template: bool = False
    messages_api: bool = False
    truncation: Truncation | None = None


Prompt = TextPrompts | TokenPrompts | ChatPrompt
