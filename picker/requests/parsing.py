"""From a request's head and body to an InferenceRequest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from picker.requests.chat import ChatBody, chat_prompt, messages_of
from picker.requests.codings import decode_content
from picker.requests.completions import CompletionBody, EmbeddingBody, completion_prompt, prompts_of
from picker.requests.errors import BadRequest, OverLimit
from picker.requests.json_body import decode_json
from picker.requests.limits import BodyLimits
from picker.requests.messages import MessagesBody, messages_prompt
from picker.requests.prompts import ChatPrompt, Prompt
from picker.requests.request import InferenceRequest
from picker.requests.responses import ResponsesBody, responses_prompt
from picker.requests.routes import Route, route_of


def parse_request(
    method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes, limits: BodyLimits
) -> InferenceRequest:
    """Read a request whose body has arrived whole. Header names are lower case.

    A path that is none of the inference APIs, or a method other than POST, gives `Route.OTHER`. The bodies of that and
    of `Route.OPAQUE` stay unread.
    Raises BadRequest (400, 413 or 415) for an inference request that no engine could serve.
    """
    if len(body) > limits.max_body_bytes:
        raise OverLimit(
            f"the body is larger than {limits.max_body_bytes} bytes",
            "max_body_bytes",
            code="body_too_large",
            status=413,
        )
    route = route_of(method, path)
    reader = _READERS.get(route)
    if reader is None:
        return InferenceRequest(route, size_bytes=len(body))
    content_encoding = ",".join(value for name, value in headers if name == "content-encoding")
    if content_encoding:
        body = decode_content(body, content_encoding, limits.max_expanded_bytes)
    if not body:
        raise BadRequest("the request needs a JSON body", code="missing_body")
    fields = decode_json(body, reader.decoder, limits)
    return InferenceRequest(
        route,
        model=_model(fields.model, limits),
        prompt=reader.prompt(fields, limits),
        stream=bool(fields.stream),
        max_tokens=_max_tokens(fields),
        cache_salt=_cache_salt(fields.cache_salt, limits),
        priority=_integer(fields.priority, "priority"),
        size_bytes=len(body),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    decoder: msgspec.json.Decoder[Any]
    prompt: Callable[[Any, BodyLimits], Prompt | None]


def _embedding_prompt(body: EmbeddingBody, limits: BodyLimits) -> Prompt:
    if body.messages is not msgspec.UNSET:
        return ChatPrompt(messages_of(body.messages, "messages", limits), add_generation_prompt=False)
    return prompts_of(body.input, "input", limits, add_special_tokens=bool(body.add_special_tokens))


_READERS = {
    Route.COMPLETIONS: _Reader(msgspec.json.Decoder(CompletionBody), completion_prompt),
    Route.CHAT: _Reader(msgspec.json.Decoder(ChatBody), chat_prompt),
    Route.RESPONSES: _Reader(msgspec.json.Decoder(ResponsesBody), responses_prompt),
    Route.MESSAGES: _Reader(msgspec.json.Decoder(MessagesBody), messages_prompt),
    Route.EMBEDDINGS: _Reader(msgspec.json.Decoder(EmbeddingBody), _embedding_prompt),
}


def _model(value: Any, limits: BodyLimits) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRequest("model must be a string", param="model")
    if len(value) > limits.max_model_length:
        raise OverLimit(
            f"model is longer than {limits.max_model_length} characters", "max_model_length", param="model"
        )
    return value


def _cache_salt(value: Any, limits: BodyLimits) -> str | None:
    if value is None:
        return None
    wanted = f"cache_salt must be a string of 1 to {limits.max_cache_salt_length} characters"
    if not isinstance(value, str) or not value:
        raise BadRequest(wanted, param="cache_salt")
    if len(value) > limits.max_cache_salt_length:
        raise OverLimit(wanted, "max_cache_salt_length", param="cache_salt")
    return value


def _max_tokens(fields: Any) -> int | None:
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        value = getattr(fields, name, None)
        if value is not None:
            return max(0, number) if (number := _integer(value, name)) is not None else None
    return None


# What both 64-bit engines and our own arithmetic take without surprise.
_LARGEST = 2**53


def _integer(value: Any, param: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise BadRequest(f"{param} must be an integer", param=param)
    return max(-_LARGEST, min(_LARGEST, int(value)))
