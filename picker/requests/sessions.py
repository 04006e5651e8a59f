"""Which session a request belongs to: by a hint, by a header of the operator's choice, or by a cookie of our own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from picker.requests.hints import identity

# Whoever knows a session's id is taken to be of it, so ours cannot be guessed.
_COOKIE_BYTES = 16


def _random_id() -> str:
    return secrets.token_urlsafe(_COOKIE_BYTES)


@dataclass(frozen=True, slots=True)
class SessionSource:
    """`header` (lower case) and `cookie` are names; None: not looked at. `cookie_age`: seconds that clients keep it."""

    header: str | None = None
    cookie: str | None = None
    cookie_age: int = 1800
    new_id: Callable[[], str] = _random_id

    def find(self, headers: Sequence[tuple[str, str]], hint: str | None) -> str | None:
        """The id of the request's session, if it says one: the operator's header first, the cookie last."""
        if self.header is not None:
            for name, value in headers:
                if name == self.header and value.strip():
                    return identity(value)
        if hint is not None or self.cookie is None:
            return hint
        return self._in_cookies(headers)

    def set_cookie(self, session: str, headers: Sequence[tuple[str, str]]) -> str:
        """The value of `set-cookie` that gives a new session its id. headers: those of the request."""
        secure = any(name == "x-forwarded-proto" and value == "https" for name, value in headers)
        attributes = (
            f"Path=/; Max-Age={self.cookie_age}; HttpOnly; SameSite=Lax{'; Secure' if secure else ''}"
        )
        return f"{self.cookie}={session}; {attributes}"

    def _in_cookies(self, headers: Sequence[tuple[str, str]]) -> str | None:
        for name, value in headers:
            if name != "cookie":
                continue
            for pair in value.split(";"):
                key, _, text = pair.partition("=")
                if key.strip() == self.cookie and (session := text.strip().strip('"')):
                    return identity(session)
        return None
