"""A client that checks each answer to the byte: whole, or broken off after a part that is right."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from tests.faults.engine import whole_answer

_serial = itertools.count()


class End(StrEnum):
    WHOLE = "whole"
    CUT = "cut"  # broken off: what came before is right
    REFUSED = "refused"  # an error response of Picker's
    GATEWAY_ERROR = "gateway_error"  # an error response of Envoy's own
    NO_ANSWER = "no_answer"  # not even a status


@dataclass(frozen=True, slots=True)
class Answer:
    end: End
    status: int = 0
    events: int = 0
    reason: str = ""
    retry_after: str | None = None
    detail: str = ""  # of a gateway's error, in its words


class WrongBytes(AssertionError):
    """A byte was lost, changed, doubled or out of order."""


@dataclass(slots=True)
class CheckingClient:
    """Sends unlike requests through Envoy at `url`, and remembers how each one ended. `begun`: good answers of which
    something has come.
    """

    url: str
    session: aiohttp.ClientSession
    answers: list[Answer] = field(default_factory=list)
    begun: int = 0

    async def send(
        self,
        *,
        events: int = 5,
        pause: float = 0.0,
        tokens: int = 40,
        headers: dict[str, str] | None = None,
        timeout: float = 60.0,
        padding: int | None = None,
    ) -> Answer:
        """`tokens`: of the prompt. `padding`: further bytes of the body; by default it differs a little each time."""
        serial = next(_serial)
        wanted: dict[str, Any] = {"model": "tiny", "events": events, "pause": pause, "stream": True}
        # Token ids that no other request has, so that nothing is cached.
        wanted["prompt"] = [serial % 900 + 1] * tokens
        wanted["user"] = f"client {serial} " + "x" * (serial * 977 % 5000 if padding is None else padding)
        answer = await self._post(json.dumps(wanted).encode(), events, headers or {}, timeout)
        self.answers.append(answer)
        return answer

    async def has_begun(self, count: int) -> None:
        """Wait until that many answers have begun, since the start of the test."""
        async with asyncio.timeout(60):
            while self.begun < count:
                await asyncio.sleep(0.005)

    async def _post(self, body: bytes, events: int, headers: dict[str, str], timeout: float) -> Answer:
        got = bytearray()
        response = None
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self.session.post(
                f"{self.url}/v1/completions", data=body, headers=headers, timeout=limit
            ) as response:
                async for piece in response.content.iter_any():
                    self.begun += response.status == 200 and not got
                    got += piece
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            if response is None:
                return Answer(End.NO_ANSWER)
        if response is None:
            return Answer(End.NO_ANSWER)
        if response.status != 200:
            return _refusal(response, bytes(got))
        return _check(bytes(got), body, events)


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> Answer:
    reason = response.headers.get("x-picker-dropped-reason")
    if reason is None:
        return Answer(End.GATEWAY_ERROR, response.status, detail=body[:200].decode("latin-1"))
    error = json.loads(body)["error"]
    if error["code"] is None or not error["message"]:
        raise AssertionError(f"an error without words: {body!r}")
    return Answer(End.REFUSED, response.status, 0, reason, response.headers.get("retry-after"))


def _check(got: bytes, body: bytes, events: int) -> Answer:
    expected = whole_answer(body, events)
    if got == expected:
        return Answer(End.WHOLE, 200, events)
    if not expected.startswith(got):
        at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b) if got else 0
        raise WrongBytes(f"byte {at}: got {got[at : at + 60]!r} instead of {expected[at : at + 60]!r}")
    return Answer(End.CUT, 200, max(0, got.count(b"\n\n") - 1))
