"""Readers known to Kubernetes: a bearer token is shown to the API server, which says whose it is (TokenReview)."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol

from picker.pool.kube.errors import ApiError

log = logging.getLogger(__name__)

_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
_MAX_TOKEN_CHARS = 16 * 1024
_AT_ONCE = 4
_REMEMBERED = 256
_TIMEOUT = 5.0


class ReviewApi(Protocol):
    """What is needed of `pool.kube.api.KubeApi`."""

    async def request(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        *,
        timeout: float,
    ) -> dict[str, Any]: ...

    async def refresh(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class TokenReviewStats:
    """Questions to the API server, by what came of them."""

    answers: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("admitted", "refused", "failed"), 0)
    )


class TokenReview:
    """Admits the bearers of tokens that are, by the API server's word, of one of `names`: a user or a group.

    With `audiences`, tokens must be for one of them. An answer is remembered for `ttl` seconds, by the token's hash;
    that of a token that was revoked too. `connect` is called at the first question.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[ReviewApi]],
        names: Iterable[str],
        audiences: Sequence[str] = (),
        *,
        clock: Callable[[], float],
        ttl: float = 10.0,
    ) -> None:
        self.stats = TokenReviewStats()
        self._connect = connect
        self._names = frozenset(names)
        self._audiences = tuple(audiences)
        self._clock = clock
        self._ttl = ttl
        self._api: ReviewApi | None = None
        self._turns = asyncio.Semaphore(_AT_ONCE)
        # Hash -> until when, and whether it is admitted. The oldest come first.
        self._known: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()

    async def admits(self, token: str) -> bool:
        """Whether the bearer may look. False also when the API server cannot be asked."""
        if not token or len(token) > _MAX_TOKEN_CHARS or not token.isascii() or not token.isprintable():
            return False
        key = sha256(token.encode()).digest()
        if (known := self._remembered(key)) is not None:
            return known
        async with self._turns:
            if (known := self._remembered(key)) is not None:
                return known
            return await self._ask(key, token)

    async def close(self) -> None:
        if self._api is not None:
            await self._api.close()

    def _remembered(self, key: bytes) -> bool | None:
        until, admitted = self._known.get(key, (0.0, False))
        return admitted if until > self._clock() else None

    async def _ask(self, key: bytes, token: str) -> bool:
        try:
            status = await self._review(token)
        # Connecting fails in as many ways as there are kinds of credentials.
        except Exception as error:
            self.stats.answers["failed"] += 1
            log.warning("the API server cannot be asked about a reader's token: %s", error)
            return False
        admitted = self._is_admitted(status)
        self.stats.answers["admitted" if admitted else "refused"] += 1
        self._known.pop(key, None)
        self._known[key] = (self._clock() + self._ttl, admitted)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return admitted

    async def _review(self, token: str) -> Any:
        if self._api is None:
            self._api = await self._connect()
        spec = {"token": token} | ({"audiences": list(self._audiences)} if self._audiences else {})
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        try:
            answer = await self._api.request("POST", _PATH, (), body, timeout=_TIMEOUT)
        except ApiError as error:
            if error.status != 401:
                raise
            # Picker's own token has been rotated.
            await self._api.refresh()
            answer = await self._api.request("POST", _PATH, (), body, timeout=_TIMEOUT)
        return answer.get("status")

    def _is_admitted(self, status: Any) -> bool:
        if not isinstance(status, dict) or status.get("authenticated") is not True:
            return False
        # An API server that knows nothing of audiences leaves them out, and has not looked at them.
        if self._audiences and not set(self._audiences) & set(_texts(status.get("audiences"))):
            return False
        user = status.get("user")
        if not isinstance(user, dict):
            return False
        return bool(self._names & {*_texts([user.get("username")]), *_texts(user.get("groups"))})


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
