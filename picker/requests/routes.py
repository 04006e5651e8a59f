"""Which API a path belongs to."""

from __future__ import annotations

from enum import StrEnum
from urllib.parse import unquote


class Route(StrEnum):
    """The inference APIs whose prompts Picker reads, and `OPAQUE` for those that it does not read: their bodies' size
    is what they cost. Every other path is `OTHER`: routed at once, free of charge.
    """

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    OPAQUE = "opaque"
    OTHER = "other"


_SUFFIXES = (
    ("/v1/chat/completions", Route.CHAT),
    ("/v1/completions", Route.COMPLETIONS),
    ("/v1/responses", Route.RESPONSES),
    ("/v1/messages", Route.MESSAGES),
    ("/v1/embeddings", Route.EMBEDDINGS),
    # vLLM's door for SageMaker, its token-in-token-out API, and SGLang's own API.
    ("/invocations", Route.OPAQUE),
    ("/generate", Route.OPAQUE),
)


def route_of(method: str, path: str) -> Route:
    """The route of a request line. Query, fragment and trailing slashes do not count; any prefix may stand first.

    Engines' servers match the path unquoted, so that is done here too: no spelling gets past the queue.
    """
    if method.upper() != "POST":
        return Route.OTHER
    bare = unquote(path.partition("?")[0].partition("#")[0]).rstrip("/")
    for suffix, route in _SUFFIXES:
        if bare.endswith(suffix):
            return route
    return Route.OTHER
