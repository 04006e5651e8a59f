"""The Dockerfile's steps, taken in a directory instead of in a container: same commands, same files, other roots."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from tests.house.files import ROOT, tracked

# The directories that the Dockerfile writes to.
ROOTS = ("/opt", "/src", "/dist")


def build(into: Path) -> Path:
    """Take the steps of the first stage; gives what the image has as `/opt/picker`."""
    (into / "src").mkdir()
    for word, rest in _steps(ROOT / "Dockerfile"):
        match word:
            case "COPY":
                *sources, target = rest.split()
                for source in sources:
                    _copy(source, into / "src" / target)
            case "RUN":
                _run(_moved(rest, into), into / "src")
            case "WORKDIR":
                assert rest == "/src"
            case _:
                raise AssertionError(f"what does {word} do?")
    return into / "opt" / "picker"


def _steps(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, the rest of it) between the first FROM and the second."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("FROM ")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines[starts[0] + 1 : starts[1]]]


def _moved(command: str, into: Path) -> str:
    """With the roots inside `into`, and this Python for the base image's."""
    for root in ROOTS:
        command = re.sub(rf"(?<![\w.-]){root}(?=/|\s|$)", f"{into}{root}", command)
    return re.sub(r"(?<![\w/])python(?= )", sys.executable, command)


def _copy(source: str, target: Path) -> None:
    """As `docker build` does: what .dockerignore leaves out is not there, and a folder's content is copied."""
    found = [path for path in _context() if path == ROOT / source or (ROOT / source) in path.parents]
    assert found, f"COPY {source}: .dockerignore leaves nothing of it"
    for path in found:
        folder = (ROOT / source).is_dir()
        destination = target / path.relative_to(ROOT / source) if folder else target / path.name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, destination)


def _context() -> list[Path]:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    kept = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    dropped = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    return [
        path
        for path in tracked()
        if (parts := path.relative_to(ROOT).parts)[0] in kept
        and not any(fnmatch(part, pattern) for part in parts for pattern in dropped)
    ]


def _run(command: str, directory: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        ["sh", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
