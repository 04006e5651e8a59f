"""The documentation says what is so: commands exist, links lead somewhere, generated parts are fresh."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from picker.cli import COMMANDS, app
from picker.cli.reference import readmes, renewed
from picker.settings import all_settings

from .files import ROOT, tracked


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def commands() -> Iterator[tuple[Path, str]]:
    """Each line of a shell block of the documentation, and each `picker ...` or `make ...` in running text."""
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield path, line.strip().removeprefix("$ ")
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for line in re.findall(r"`((?:picker|make) [^`]+)`", prose):
            yield path, line


@pytest.mark.parametrize("readme", readmes(), ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_parts_are_fresh(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    assert text == renewed(text, readmes()[readme]), "run: make docs"


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the marks"):
        renewed("# nothing\n", "")


def test_every_picker_command_in_the_docs_exists_with_its_flags() -> None:
    known_flags = {setting.flag for setting in all_settings()}
    for path, line in commands():
        words = shlex.split(line, comments=True)
        if not words or words[0] != "picker" or len(words) == 1 or words[1].startswith("-"):
            continue
        where = f"{path.relative_to(ROOT)}: {line}"
        assert words[1] in COMMANDS, where
        help_text = (
            CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"}).output
        )
        for flag in (word.split("=")[0] for word in words[2:] if word.startswith("--")):
            assert flag in help_text or flag in known_flags, where


def test_every_make_target_in_the_docs_and_in_ci_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ci = re.findall(
        r'^stage "[^"]+" make(?: --[a-z-]+)* ([a-z-]+)', (ROOT / ".ci" / "run").read_text(), re.MULTILINE
    )
    assert set(ci) <= targets
    assert ci
    for path, line in commands():
        words = line.split()
        if len(words) > 1 and words[0] == "make":
            assert words[1] in targets, f"{path.relative_to(ROOT)}: {line}"


def test_every_target_is_listed_by_make_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = set(" ".join(re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)).split())
    described = set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
    assert phony == described


def test_links_between_files_lead_somewhere() -> None:
    for path in documents():
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith("mailto:"):
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"


def test_settings_named_in_the_docs_exist() -> None:
    known = {setting.env for setting in all_settings()}
    for path in documents():
        for name in re.findall(r"PICKER_[A-Z_]+__[A-Z_]+", path.read_text(encoding="utf-8")):
            assert name in known, f"{path.relative_to(ROOT)}: {name}"
