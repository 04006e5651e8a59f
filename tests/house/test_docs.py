"""The documentation says what is so: commands exist, links lead somewhere, generated parts are fresh."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner

from picker.cli import COMMANDS, app
from picker.cli.reference import readmes, renewed
from picker.settings import all_settings

from .files import ROOT, tracked


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def commands() -> Iterator[tuple[Path, str]]:
    """Each command of a shell block of the documentation, and each `picker ...` or `make ...` in running text."""
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield from ((path, command) for command in commands_of(block))
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for block in re.findall(r"(?:^ {4}\S.*\n(?:^ {4}.*\n)*)", prose, re.MULTILINE):
            yield from ((path, command) for command in commands_of(dedent(block)))
        for line in re.findall(r"`((?:picker|make) [^`]+)`", prose):
            yield path, line


def commands_of(block: str) -> Iterator[str]:
    """Where a block has prompts, the rest of it is output. A command goes on while a quotation is open."""
    lines = iter(block.replace("\\\n", " ").splitlines())
    prompts = "\n$ " in f"\n{block}"
    for line in lines:
        if prompts and not line.startswith("$ "):
            continue
        command = line.removeprefix("$ ").strip()
        while not _closed(command):
            command += "\n" + next(lines)
        yield command


def _closed(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def test_commands_are_told_from_their_output_and_may_be_of_several_lines() -> None:
    block = "$ picker a \\\n  --b\nan answer's text\n$ curl -d '{\n  1}' # it's\n"
    assert list(commands_of(block)) == ["picker a    --b", "curl -d '{\n  1}' # it's"]


@pytest.mark.parametrize("readme", readmes(), ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_parts_are_fresh(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    assert text == renewed(text, readmes()[readme]), "run: make docs"


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the marks"):
        renewed("# nothing\n", "")


def test_every_picker_command_in_the_docs_exists_with_its_flags() -> None:
    known_flags = {setting.flag for setting in all_settings()}
    for where, words in picker_commands():
        assert words[1] in COMMANDS, where
        help_text = (
            CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"}).output
        )
        for flag in (word.split("=")[0] for word in words[2:] if word.startswith("--")):
            assert flag in help_text or flag in known_flags, where


def picker_commands() -> Iterator[tuple[str, list[str]]]:
    """(where it stands, its words) of each that names a subcommand."""
    for path, line in commands():
        words = shlex.split(line, comments=True)
        if len(words) > 1 and words[0] == "picker" and not words[1].startswith("-"):
            yield f"{path.relative_to(ROOT)}: {line}", words


# Subcommands that the docs call with arguments and that other tests run, and where.
RUN_ELSEWHERE = {
    "record": "tests/cli/test_record.py",
    "replay": "tests/e2e/test_recording.py",
    "simulate": "tests/simulation/test_simulate_command.py",
    "study": "tests/simulation/test_studies.py",
    "taint": "tests/cli/test_taint.py",
}
RUN_HERE = {"check", "explain-policy", "reference", "serve"}


def test_every_picker_command_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, beside the files that the README shows."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    policy, pool = re.findall(r"^```yaml\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[:2]
    (tmp_path / "policy.yaml").write_text(policy)
    (tmp_path / "pool.yaml").write_text(pool)
    (tmp_path / "picker.yaml").write_text("policy: {file: policy.yaml}\npool: {file: pool.yaml}\n")
    monkeypatch.chdir(tmp_path)
    ran = set()
    for where, words in picker_commands():
        name, arguments = words[1], words[2:]
        if name in RUN_ELSEWHERE:
            assert f'"{name}"' in (ROOT / RUN_ELSEWHERE[name]).read_text(encoding="utf-8"), where
        elif arguments and "--help" not in arguments and "--write" not in arguments:
            assert name in RUN_HERE, f"{where}: no test runs this"
            ran.add(name)
            run = _serves if name == "serve" else _succeeds
            run(where, words[1:])
    assert ran >= {"check", "explain-policy", "serve"}


def _succeeds(where: str, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"{where}: {result.output}"


def _serves(where: str, arguments: list[str]) -> None:
    """It comes up, and ends when it is told to. The ports are any that are free."""
    ports = ("--extproc-port", "--extproc-health-port", "--admin-port", "--admin-grpc-port")
    command = [sys.executable, "-m", "picker", *arguments, "--queue-drain-grace", "0"]
    command += [word for port in ports for word in (port, "0")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        came_up = any("serving" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert came_up, where
    assert process.returncode == 0, f"{where}: {rest}"


def test_every_make_target_in_the_docs_and_in_ci_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ci = re.findall(
        r'^(?:stage|tests) "[^"]+" make(?: --[a-z-]+)* ([a-z-]+)',
        (ROOT / ".ci" / "run").read_text(),
        re.MULTILINE,
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
