"""What an engine reports of a request in its response: the tokens it read, had cached, and wrote."""

from __future__ import annotations

import json
import re
from typing import Any

from msgspec import Struct

_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
_DECODER = json.JSONDecoder()

# `usage` stands at the end of an answer; only Anthropic's stream has its input figures at the start.
_HEAD_BYTES = 4 * 1024
_TAIL_BYTES = 16 * 1024
_LARGEST = 2**53


class Usage(Struct, frozen=True, array_like=True):
    """Tokens as reported. None: not reported."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class UsageReader:
    """Reads the usage out of a response that passes by, of whatever API and streamed or not.

    It keeps the first 4 KiB and the last 16 KiB of the body, never the whole. What is no usage is ignored: the
    response has long been on its way to the client.
    """

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        room = _HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]

    def usage(self) -> Usage | None:
        """What has been reported so far; later figures stand over earlier ones."""
        found: dict[str, int] = {}
        kept = bytes(self._head + self._tail)
        for match in _USAGE.finditer(kept):
            reported = _object_at(kept, match.end())
            if reported is not None:
                found |= _figures(reported)
        return Usage(**found) if found else None


def _object_at(data: bytes, start: int) -> dict[str, Any] | None:
    try:
        value, _ = _DECODER.raw_decode(data[start : start + _TAIL_BYTES].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _figures(usage: dict[str, Any]) -> dict[str, int]:
    """The figures under OpenAI's names for completions and for responses, and under Anthropic's."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    figures = {
        "prompt_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "cached_tokens": details.get("cached_tokens")
        if isinstance(details, dict)
        else usage.get("cache_read_input_tokens"),
        "output_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
    }
    return {name: value for name, value in figures.items() if type(value) is int and 0 <= value <= _LARGEST}
