"""Imports point one way: the deciding rooms know nothing of sockets, servers or the command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .files import ROOT

PACKAGE = ROOT / "picker"

# What a room may import of the others, beside itself.
MAY_IMPORT: dict[str, set[str]] = {
    "policy": set(),
    "requests": {"policy"},
    "tokens": {"requests", "policy"},
    "kvcache": {"policy"},
    "pool": {"policy"},
    "selection": {"pool", "kvcache", "policy"},
    "queueing": {"selection", "pool", "kvcache", "policy"},
    "telemetry": set(),
    "api": set(),
    "rpc": set(),
    "extproc": {
        "rpc",
        "requests",
        "tokens",
        "kvcache",
        "pool",
        "selection",
        "queueing",
        "policy",
        "telemetry",
    },
    "settings": {"policy", "requests"},
}
EVERYTHING_BELOW = set(MAY_IMPORT)
MAY_IMPORT["garbage"] = set()
MAY_IMPORT["faces"] = EVERYTHING_BELOW | {"garbage"}
MAY_IMPORT["admin"] = EVERYTHING_BELOW - {"settings"}
MAY_IMPORT["simulation"] = EVERYTHING_BELOW | {"admin", "app"}
MAY_IMPORT["app"] = EVERYTHING_BELOW | {"admin", "faces"}
MAY_IMPORT["cli"] = MAY_IMPORT["app"] | {"app", "garbage", "simulation"}
# The plugin is one more command line; it reaches pickers by their API.
MAY_IMPORT["kubectl"] = EVERYTHING_BELOW | {"admin", "cli"}
MAY_IMPORT["__main__"] = {"cli"}

# Decided by sans-IO code only: time and randomness come in as arguments.
SANS_IO = {"policy", "queueing", "selection", "requests"}
SANS_IO_FILES = {
    "pool": {"endpoint", "pool", "ledger", "calibration", "metrics_text"},
    "kvcache": {"keys", "index", "engine_blocks", "events", "matching", "predicted", "accuracy"},
    "extproc": {"conversation", "body", "messages", "handover", "following"},
    "rpc": {"budget", "framing"},
    "faces": {"messages", "protocol", "asking", "answering", "tally"},
    "telemetry": {"shares", "decisions", "sources", "catalogue"},
}
IO_MODULES = {
    "asyncio",
    "socket",
    "threading",
    "concurrent",
    "aiohttp",
    "grpc",
    "zmq",
    "selectors",
    "subprocess",
}
# The decision log hands decisions on to who waits for them.
SANS_IO_EXCEPT = {("telemetry", "decisions"): {"asyncio"}}


def modules() -> Iterator[tuple[str, Path]]:
    """(room, file) of everything in the package that is not generated."""
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if "_pb2" not in path.name and relative != Path("__init__.py"):
            yield relative.parts[0].removesuffix(".py"), path


def imports(path: Path, *, for_types: bool = True) -> Iterator[str]:
    """Every module named in an import, wherever in the file it stands; without the ones for types on request."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = path.relative_to(ROOT).parent.parts
    skipped: set[int] = set()
    if not for_types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "picker" else (module,)


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_imports_point_one_way(room: str) -> None:
    allowed = MAY_IMPORT[room] | {room, "__version__"}
    for owner, path in modules():
        if owner != room:
            continue
        # Telemetry may name the rooms' types, as long as it runs without them.
        for name in imports(path, for_types=room != "telemetry"):
            top, _, rest = name.partition(".")
            if top == "picker" and rest:
                assert rest.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_every_room_has_a_rule() -> None:
    assert {room for room, _ in modules()} <= set(MAY_IMPORT)


def test_the_rules_have_no_circle() -> None:
    seen: set[str] = set()
    left = dict(MAY_IMPORT)
    while left:
        ready = [room for room, others in left.items() if others <= seen]
        assert ready, f"a circle among {sorted(left)}"
        for room in ready:
            seen.add(room)
            del left[room]


def test_the_deciding_core_does_no_io() -> None:
    for room, path in modules():
        if room in SANS_IO or path.stem in SANS_IO_FILES.get(room, ()):
            allowed = SANS_IO_EXCEPT.get((room, path.stem), set())
            for name in imports(path):
                top = name.split(".")[0]
                assert top not in IO_MODULES - allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_the_pools_sources_do_not_know_the_cache() -> None:
    for room, path in modules():
        if room == "pool":
            assert not any(name.startswith("picker.kvcache") for name in imports(path)), path
