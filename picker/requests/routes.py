"""Which API a path belongs to."""

from __future__ import annotations

from enum import StrEnum


class Route(StrEnum):
    """The inference APIs whose prompts Picker reads. Every other path is `OTHER`: routed, without tokens."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    OTHER = "other"


_SUFFIXES = (
    ("/v1/chat/completions", Route.CHAT),
    ("/v1/completions", Route.COMPLETIONS),
    ("/v1/responses", Route.RESPONSES),
    ("/v1/messages", Route.MESSAGES),
    ("/v1/embeddings", Route.EMBEDDINGS),
)


def route_of(method: str, path: str) -> Route:
    """The route of a request line. Query, fragment and trailing slashes do not count; any prefix may stand first."""
    if method.upper() != "POST":
        return Route.OTHER
    bare = path.partition("?")[0].partition("#")[0].rstrip("/")
    for suffix, route in _SUFFIXES:
        if bare.endswith(suffix):
            return route
    return Route.OTHER
