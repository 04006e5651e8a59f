"""What must stand in no file of the repository."""

from __future__ import annotations

import re

from .files import ROOT, tracked

EM_DASH = chr(0x2014)
# Spelt so that this file does not have them in it.
WORKPLACE = re.compile(
    "|".join(
        [
            "/wo" + r"rk/",
            r"\." + "library",
            "tool " + "library",
            "/opt/" + "wheels",
            "farm-" + r"(?:bench|studio)",
            "files.python" + "hosted",
            r"\bissues " + r"show\b",
        ]
    ),
    re.IGNORECASE,
)
SECRETS = re.compile(
    r"-----BEGIN (?:RSA |EC )?PRIVATE "
    + r"KEY-----|AKIA[0-9A-Z]{16}|ghp_[A-Za-z0-9]{36}|xox[bp]-[0-9A-Za-z-]{20,}"
)
BINARY = {".png", ".gz", ".ico", ".zst"}


def texts() -> list[tuple[str, str]]:
    paths = [path for path in tracked() if path.suffix not in BINARY]
    return [
        (str(path.relative_to(ROOT)), path.read_text(encoding="utf-8", errors="replace")) for path in paths
    ]


def test_no_em_dash() -> None:
    assert [name for name, text in texts() if EM_DASH in text and not name.endswith("tokenizer.json")] == []


def test_nothing_of_the_place_where_it_was_written() -> None:
    assert [(name, found[0]) for name, text in texts() if (found := WORKPLACE.search(text))] == []


def test_no_secrets() -> None:
    assert [name for name, text in texts() if SECRETS.search(text)] == []


def test_every_text_ends_with_a_newline_and_no_line_with_blanks() -> None:
    code = (".py", ".md", ".toml", ".proto", ".html")
    for name, text in texts():
        if name.endswith(code) and text:
            assert text.endswith("\n"), name
            assert not re.search(r"[ \t]+$", text, re.MULTILINE), name


def test_generated_code_is_not_committed() -> None:
    assert [str(path) for path in tracked() if "_pb2" in path.name] == []


def test_the_lock_names_no_host() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    assert "--hash=sha256:" in lock
