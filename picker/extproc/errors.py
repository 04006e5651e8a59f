"""Error bodies in the shape of the OpenAI API."""

from __future__ import annotations

import msgspec

from picker.extproc.handler import Refused

MAX_MESSAGE_CHARS = 2000

_KINDS = {413: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


def error_json(refused: Refused) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`; the message is cut to 2,000 characters.

    Text that is not valid Unicode (lone surrogates from a client's JSON) is replaced, never raised on.
    """
    kind = refused.kind or _KINDS.get(refused.status) or _kind_of_family(refused.status)
    error = {
        "message": _clean(refused.message),
        "type": kind,
        "param": None if refused.param is None else _clean(refused.param),
        "code": refused.code or refused.reason,
    }
    return msgspec.json.encode({"error": error})


def _kind_of_family(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def _clean(text: str) -> str:
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
