"""Where the control plane's binaries are. `assets/build` makes them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BUILD = Path(__file__).parent / "assets" / "build"
NEEDED = ("etcd", "kube-apiserver", "kubectl", "helm")


@dataclass(frozen=True, slots=True)
class Binaries:
    etcd: Path
    kube_apiserver: Path
    kubectl: Path
    helm: Path


def find_binaries() -> Binaries | None:
    """All of them, or None when one is missing."""
    paths = [path for name in NEEDED if (path := find_binary(name))]
    return Binaries(*paths) if len(paths) == len(NEEDED) else None


def find_binary(name: str) -> Path | None:
    """From KUBEBUILDER_ASSETS, then from the directory that `assets/build` fills."""
    places = [place for place in (os.environ.get("KUBEBUILDER_ASSETS"), _built()) if place]
    found = shutil.which(name, path=os.pathsep.join(places))
    return Path(found) if found else None


@functools.cache
def _built() -> str:
    return subprocess.run([BUILD, "--where"], capture_output=True, text=True, check=True).stdout.strip()
