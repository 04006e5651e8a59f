"""The one error of this room."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

KeyPath = Sequence[str | int]
"""Where in a document: mapping keys and list positions from the root."""


_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,80}")
_SHOWN = 80


class PolicyError(ValueError):
    """A policy that cannot be used. Its text is for the operator: where, what, and what would be right.

    `line` counts from 1 and is None where no line is to blame (an unreadable file); `key` is the key at
    fault, without its path.
    """

    def __init__(self, source: str, problem: str, *, path: KeyPath = (), line: int | None = None) -> None:
        self.source = source
        self.line = line
        self.key = next((part for part in reversed(path) if isinstance(part, str)), None)
        where = source if line is None else f"{source}:{line}"
        what = f"{dotted(path)}: {problem}" if path else problem
        super().__init__(f"{where}: {what}")


def dotted(path: KeyPath) -> str:
    """`("models", "org/m-1.5", "policy_classes", 2)` -> `models["org/m-1.5"].policy_classes[2]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{quoted(part)}]"
    return text


def quoted(text: str) -> str:
    """Text from a file, safe to show in one line of a log: escaped, and cut when long."""
    return json.dumps(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
