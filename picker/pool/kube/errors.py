"""What can go wrong between here and the API server."""

from __future__ import annotations


class ApiError(Exception):
    """The API server did not do what was asked. `status` is None when there was no answer at all."""

    def __init__(self, status: int | None, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{status}: {message}" if status is not None else message)
        self.status = status
        self.retry_after = retry_after


class UnusableCredentials(Exception):
    """Nothing says how to reach an API server, or what says it cannot be read."""


class SilentError(ApiError):
    """The server said nothing for longer than it should."""

    def __init__(self, seconds: float) -> None:
        super().__init__(None, f"nothing heard for {seconds:g} s")
