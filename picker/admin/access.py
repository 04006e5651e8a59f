"""Who may look: anybody on this machine, or whoever has the token."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from pathlib import Path

log = logging.getLogger(__name__)

_MAX_TOKEN_BYTES = 4096

# Takes the token where Authorization does not get through: the API server's proxy keeps that for itself.
TOKEN_HEADER = "X-Picker-Token"


class Access:
    """Decides on one reader at a time.

    With a token file, its token is needed whatever the address. Without one, a server bound to loopback is open to
    this machine, and any other shows nothing. The file is read at each request: a rotated secret counts at once.
    """

    def __init__(self, host: str, token_file: Path | None) -> None:
        self._token_file = token_file
        self._loopback = is_loopback(host)

    def refusal(self, authorization: str | None, host: str | None = None) -> str | None:
        """Why a request with these headers is refused, or None when it is not.

        `host` is the Host header: a page of another site that has its name resolve to this machine still sends its
        own name there.
        """
        if self._token_file is None:
            if not self._loopback:
                return "there is no admin.token_file, so only metrics and health are served beyond loopback"
            if host is not None and not is_loopback(_without_port(host)):
                return "only requests to localhost are served without a token"
            return None
        expected = self._token()
        scheme, _, given = (authorization or "").partition(" ")
        if expected is None:
            return "the token file cannot be read"
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), expected):
            return "a valid bearer token is needed"
        return None

    def _token(self) -> bytes | None:
        assert self._token_file is not None
        try:
            with self._token_file.open("rb") as file:
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
