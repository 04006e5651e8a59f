"""A request as the rest of Picker sees it."""

from __future__ import annotations

from msgspec import Struct

from picker.requests.prompts import Prompt
from picker.requests.routes import Route


class InferenceRequest(Struct, frozen=True):
    """What was read from one request. The body itself is never changed, but for the name of its model.

    `prompt` is None on `Route.OTHER`, and where only the engine knows the text (prompt embeddings, a stored
    conversation). `priority` is the body's field, whose sign differs per engine. `size_bytes` is the size of
    the decoded body.
    """

    route: Route
    model: str | None = None
    prompt: Prompt | None = None
    stream: bool = False
    max_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    size_bytes: int = 0
