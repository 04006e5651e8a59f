"""`python -m tests.fuzz.guided TARGET LIBFUZZER-ARGUMENTS`: one target, led by coverage of Picker's own code."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["picker"]):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]].run)
    atheris.Fuzz()
