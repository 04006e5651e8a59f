"""How many tokens a prompt has: exactly, as ids, or as an estimate with the reason why."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from msgspec import Struct

from picker.requests import ChatPrompt, InferenceRequest, Route, TextPrompts, TokenPrompts

BYTES_PER_TOKEN = 4
"""UTF-8 bytes of prompt text that count as one token in an estimate."""

TOKENS_PER_MEDIA = 1024
"""What an image, a sound or a video counts as in an estimate."""


class EstimateReason(StrEnum):
    """Why a count is an estimate: a closed set, fit for a metric's label."""

    NO_TOKENIZER = "no_tokenizer"
    NO_TEMPLATE = "no_template"
    TEMPLATE_ERROR = "template_error"
    TEMPLATE_LIMIT = "template_limit"
    TOKENIZER_ERROR = "tokenizer_error"
    TIMEOUT = "timeout"
    TOO_LARGE = "too_large"
    BREAKER_OPEN = "breaker_open"
    MULTIMODAL = "multimodal"
    NO_PROMPT = "no_prompt"


class TokenCount(Struct, frozen=True):
    """The tokens of one request.

    `ids` holds one array of unsigned 32-bit ids per prompt of the batch, `count` is their sum. When `estimated`, `ids`
    is empty and `reason` says why.
    """

    ids: tuple[array[int], ...]
    count: int
    estimated: bool = False
    reason: EstimateReason | None = None

    @classmethod
    def exact(cls, ids: tuple[array[int], ...]) -> TokenCount:
        return cls(ids, sum(map(len, ids)))


def estimate(request: InferenceRequest, reason: EstimateReason) -> TokenCount:
    """A count from sizes: prompt bytes / `BYTES_PER_TOKEN`, plus `TOKENS_PER_MEDIA` a medium, at least 1."""
    size, media = _size(request)
    return TokenCount((), max(1, size // BYTES_PER_TOKEN + media * TOKENS_PER_MEDIA), True, reason)


def text_bytes(request: InferenceRequest) -> int:
    """UTF-8 bytes of the text of a request's prompt; media do not count."""
    return _size(request)[0]


def _size(request: InferenceRequest) -> tuple[int, int]:
    """(bytes of text, number of media) of a request's prompt."""
    match request.prompt:
        case TextPrompts(texts):
            return sum(map(_bytes, texts)), 0
        case TokenPrompts(prompts):
            return BYTES_PER_TOKEN * sum(map(len, prompts)), 0
        case ChatPrompt() as chat:
            size = _bytes_in(chat.tools or ()) + _bytes_in(chat.template_kwargs)
            media = 0
            for message in chat.messages:
                content = message.get("content")
                parts = content if isinstance(content, list) else [content]
                media += sum(map(is_media, parts))
                size += sum(map(_text_size, parts))
                size += _bytes_in(message.get("tool_calls"))
            return size, media
    return (0 if request.route is Route.OTHER else request.size_bytes), 0


_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
_MEDIA_KEYS = frozenset(
    {
        "image_url",
        "image_embeds",
        "input_image",
        "audio_url",
        "audio_embeds",
        "input_audio",
        "video_url",
        "video_embeds",
        "prompt_embeds",
    }
)


def is_media(part: Any) -> bool:
    """Whether a content part holds something else than text."""
    if not isinstance(part, dict):
        return False
    return part.get("type", "text") not in _TEXT_PARTS or not _MEDIA_KEYS.isdisjoint(part)


def _text_size(part: Any) -> int:
    """UTF-8 bytes of the text of a content part; none for media."""
    if isinstance(part, str):
        return _bytes(part)
    if not isinstance(part, dict) or is_media(part):
        return 0
    return _bytes_in([value for key, value in part.items() if key != "type"])


def _bytes_in(value: Any) -> int:
    """UTF-8 bytes of all text inside a value made of JSON's types."""
    total = 0
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            total += _bytes(value)
        elif isinstance(value, dict):
            waiting.extend(value)
            waiting.extend(value.values())
        elif isinstance(value, Iterable):
            waiting.extend(value)
    return total


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
