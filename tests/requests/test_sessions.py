"""Where a request's session is said, and what the cookie of a new one looks like."""

from __future__ import annotations

import http.cookies

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.requests import SessionSource

BOTH = SessionSource(header="x-chat", cookie="picker-session", cookie_age=600)


def test_the_operators_header_then_the_hint_then_the_cookie() -> None:
    headers = [("cookie", "picker-session=from-cookie"), ("x-chat", "from-header")]
    assert BOTH.find(headers, "from-hint") == "from-header"
    assert BOTH.find(headers[:1], "from-hint") == "from-hint"
    assert BOTH.find(headers[:1], None) == "from-cookie"
    assert BOTH.find([], None) is None


def test_what_is_not_named_is_not_looked_at() -> None:
    headers = [("cookie", "picker-session=a"), ("x-chat", "b")]
    assert SessionSource().find(headers, None) is None
    assert SessionSource(cookie="other").find(headers, None) is None
    assert SessionSource(header="x-other").find(headers, "hint") == "hint"


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ([("cookie", "a=1; picker-session=s7; b=2")], "s7"),
        ([("cookie", "a=1"), ("cookie", "picker-session=s7")], "s7"),
        ([("cookie", 'picker-session="s7"')], "s7"),
        ([("cookie", " picker-session = s7 ;")], "s7"),
        ([("cookie", "picker-session=first; picker-session=second")], "first"),
        ([("cookie", "picker-session=a=b==")], "a=b=="),
        ([("cookie", "not-picker-session=s7")], None),
        ([("cookie", "picker-session=; x=1")], None),
        ([("cookie", "picker-session")], None),
        ([("cookie", ";;=;=;")], None),
        ([("x-cookie", "picker-session=s7")], None),
        ([("x-chat", "  ")], None),
    ],
)
def test_cookies(headers: list[tuple[str, str]], session: str | None) -> None:
    assert BOTH.find(headers, None) == session


@given(st.text(max_size=400))
def test_whatever_a_client_sends_names_a_session_of_bounded_length_or_none(text: str) -> None:
    for headers in ([("cookie", f"picker-session={text}")], [("cookie", text)], [("x-chat", text)]):
        found = BOTH.find(headers, None)
        assert found is None or (found.isascii() and found.isprintable() and 0 < len(found) <= 256)


def test_a_new_session_is_said_in_a_cookie_that_comes_back() -> None:
    session = BOTH.new_id()
    cookie = http.cookies.SimpleCookie(BOTH.set_cookie(session, []))["picker-session"]
    assert (cookie.value, cookie["max-age"], cookie["path"], cookie["samesite"]) == (
        session,
        "600",
        "/",
        "Lax",
    )
    assert cookie["httponly"]
    assert not cookie["secure"]
    assert BOTH.find([("cookie", f"{cookie.key}={cookie.value}")], None) == session


def test_over_https_it_is_for_https_only() -> None:
    assert BOTH.set_cookie("s", [("x-forwarded-proto", "https")]).endswith("; Secure")
    assert "Secure" not in BOTH.set_cookie("s", [("x-forwarded-proto", "http")])


def test_ids_cannot_be_guessed() -> None:
    ids = {BOTH.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert min(map(len, ids)) >= 22
