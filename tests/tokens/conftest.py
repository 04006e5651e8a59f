"""Fixtures: trained tokenizers, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.tokens.models import KINDS, save


@pytest.fixture(scope="session")
def trained() -> Callable[[str], Tokenizer]:
    """A tokenizer of one of `KINDS`, trained at its first use."""
    made: dict[str, Tokenizer] = {}

    def get(kind: str) -> Tokenizer:
        if kind not in made:
            made[kind] = KINDS[kind]()
        return made[kind]

    return get


@pytest.fixture(scope="session")
def model_directory(
    trained: Callable[[str], Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A model directory with a tokenizer of a kind and a chat template."""
    written: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in written:
            written[kind] = save(trained(kind), tmp_path_factory.mktemp(kind))
        return written[kind]

    return get
