"""The errors of this room: a request that a client must correct."""

from __future__ import annotations


class BadRequest(Exception):
    """A request refused because of what it holds, never because of load or of a fault of ours.

    `status` is 400 (malformed), 413 (over a limit of size) or 415 (content coding we cannot read). `message` is
    safe to send back and to log; `param` names the offending field or header, `code` is a short machine word,
    both as in the OpenAI error object.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_request", status: int = 400
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class OverLimit(BadRequest):
    """A request that passes a bound of `BodyLimits`; `limit` is the bound's name."""

    def __init__(
        self,
        message: str,
        limit: str,
        *,
        param: str | None = None,
        code: str = "over_limit",
        status: int = 400,
    ):
        super().__init__(message, param=param, code=code, status=status)
        self.limit = limit


def excerpt(value: object, limit: int = 64) -> str:
    """A short printable form of client data for an error message: no control characters, bounded length."""
    text = ascii(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else text[:limit] + "..."
