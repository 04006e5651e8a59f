"""Who may look: anybody on this machine, whoever has the token, or whom Kubernetes knows as one of a list."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from pathlib import Path

from picker.admin.token_review import TokenReview

log = logging.getLogger(__name__)

_MAX_TOKEN_BYTES = 4096

# Takes the token where Authorization does not get through: the API server's proxy keeps that for itself.
TOKEN_HEADER = "X-Picker-Token"


class Access:
    """Decides on one reader at a time.

    With a token file or a review, a token is needed whatever the address; either will do. Without them, a server
    bound to loopback is open to this machine, and any other shows nothing. The file is read at each request: a
    rotated secret counts at once.
    """

    def __init__(self, host: str, token_file: Path | None, review: TokenReview | None = None) -> None:
        self._token_file = token_file
        self._review = review
        self._loopback = is_loopback(host)

    async def refusal(self, authorization: str | None, host: str | None = None) -> str | None:
        """Why a request with these headers is refused, or None when it is not.

        `host` is the Host header: a page of another site that has its name resolve to this machine still sends its
        own name there.
        """
        if self._token_file is None and self._review is None:
            return self._refusal_without_tokens(host)
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() == "bearer" and await self._is_admitted(given.strip()):
            return None
        return "a valid bearer token is needed"

    async def close(self) -> None:
        if self._review is not None:
            await self._review.close()

    def _refusal_without_tokens(self, host: str | None) -> str | None:
        if not self._loopback:
            return "there is no admin.token_file, so only metrics and health are served beyond loopback"
        if host is not None and not is_loopback(_without_port(host)):
            return "only requests to localhost are served without a token"
        return None

    async def _is_admitted(self, given: str) -> bool:
        expected = self._token(self._token_file) if self._token_file else None
        if expected is not None and hmac.compare_digest(given.encode(), expected):
            return True
        return self._review is not None and await self._review.admits(given)

    @staticmethod
    def _token(token_file: Path) -> bytes | None:
        try:
            with token_file.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).strip()
        except OSError as error:
            log.warning("the admin token file cannot be read: %s", error.strerror)
            return None
        # An empty file must not make the empty token valid.
        return token or None


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] or host
