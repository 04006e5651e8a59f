"""Compiles the gRPC API in `protos/` into `picker/api/` whenever Picker is built or installed.

Everything else about the package is in pyproject.toml. The generated modules are not committed; by hand:
`python setup.py build_protos`.
"""

from __future__ import annotations

import os
import sys
from importlib.resources import as_file, files
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "protos" / "picker"
TARGET = Path("picker") / "api"


class build_protos(Command):
    """Run protoc over protos/picker/v1/*.proto."""

    description = "compile the gRPC API"
    user_options = []  # noqa: RUF012

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        from grpc_tools import protoc

        # protoc looks for its plug-ins on the path, where an interpreter called by its full name has not put them.
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
        with as_file(files("grpc_tools") / "_proto") as well_known:
            for source in sorted(SOURCES.glob("*/*.proto")):
                package = (TARGET / source.parent.name).as_posix()
                # Mapped, so that the modules import each other as picker.api.v1, where they live.
                mapping = f"-I{package}={source.parent}"
                outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "grpc_python")]
                outputs += [f"--{kind}_out=quiet:{ROOT}" for kind in ("mypy", "mypy_grpc")]
                if protoc.main(["protoc", mapping, f"-I{well_known}", *outputs, f"{package}/{source.name}"]):
                    raise ExecError(f"protoc could not compile {source}")


class build_py_with_protos(build_py):
    """The generated modules must exist before the package's files are listed."""

    def run(self) -> None:
        self.run_command("build_protos")
        super().run()


setup(cmdclass={"build_protos": build_protos, "build_py": build_py_with_protos})
