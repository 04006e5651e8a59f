"""Where a request's processor time goes: `picker serve` behind a real Envoy, looked at by py-spy.

    python -m tests.benchmarks.bench_profile [--seconds N] [--keep FILE]

The same Picker as in bench_gateway, with everything on, under 64 clients that send requests of 300 bytes and ask again
at once. Time is that of the event loop's thread while it runs; time in native code counts for the Python function that
called it, so the gRPC library shows as the function that reads or writes. --keep: the folded stacks, for a flame graph.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from picker.simulation.envoy_config import ResponseObservation
from tests.benchmarks.bench_gateway import CASES, CLIENTS, EVENT_MESSAGES_A_SECOND, PODS
from tests.benchmarks.gateway import servers
from tests.benchmarks.gateway.client import closed_loop
from tests.benchmarks.gateway.servers import Running

TOP = 10
SAMPLES_A_SECOND = 250
_FRAME = re.compile(r"^(?P<function>.*) \((?P<file>[^()]*?)(?::\d+)?\)$")

#: One sample: (function, file) of each frame, the outermost first, and how often it was seen.
Stack = tuple[list[tuple[str, str]], int]


def loop_stacks(folded: str) -> list[Stack]:
    """The stacks of the event loop's thread, from its `_run_once` on, of py-spy's folded output."""
    stacks = []
    for line in folded.splitlines():
        text, _, seen = line.rpartition(" ")
        frames = [
            (found["function"], found["file"]) for each in text.split(";") if (found := _FRAME.match(each))
        ]
        start = next((at for at, (function, _) in enumerate(frames) if function.endswith("_run_once")), None)
        if start is not None:
            stacks.append((frames[start:], int(seen)))
    return stacks


def by_room(stacks: list[Stack]) -> Counter[str]:
    """Samples by the folder of Picker's that ran last on the stack; `loop`: none did."""
    rooms: Counter[str] = Counter()
    for frames, seen in stacks:
        ours = [file for _, file in frames if file.startswith("picker/")]
        rooms["/".join(ours[-1].split("/")[:-1]) if ours else "loop"] += seen
    return rooms


def by_function(stacks: list[Stack]) -> Counter[tuple[str, str]]:
    """Samples by the function that ran itself."""
    functions: Counter[tuple[str, str]] = Counter()
    for frames, seen in stacks:
        functions[frames[-1]] += seen
    return functions


async def record(pid: int, seconds: float, file: Path) -> None:
    """Leave the folded stacks of so many seconds in the file. Raises RuntimeError with py-spy's words if it cannot."""
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).parent / "py-spy"), "record", "--format", "raw", "--output", str(file)),
        *("--rate", str(SAMPLES_A_SECOND), "--duration", str(round(seconds)), "--pid", str(pid)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(said.decode().strip())


async def watch(server: Running, destination: Sequence[tuple[str, str]], seconds: float, file: Path) -> float:
    """Load it and look at it; returns the microseconds of a request in the event loop's thread."""
    assert server.pid is not None
    requests = CASES[0].requests(destination)
    await closed_loop(server.port, requests, CLIENTS, 3.0)
    before, threads = server.cpu_seconds(), _thread_seconds(server.pid)
    load, _ = await asyncio.gather(
        closed_loop(server.port, requests, CLIENTS, seconds), record(server.pid, seconds, file)
    )
    served = max(1, len(load.latencies))
    loop = (_thread_seconds(server.pid) - threads) / served * 1e6
    whole = (server.cpu_seconds() - before) / served * 1e6
    print(
        f"{CASES[0].name}, {PODS} pods: {whole:.0f} us of processor time a request, {loop:.0f} of them the event loop's"
    )
    return loop


def report(stacks: list[Stack], loop_microseconds: float) -> None:
    """Print each share of the loop's time, and what it comes to for a request."""
    total = sum(seen for _, seen in stacks)

    def line(name: str, seen: int) -> str:
        return f"  {seen / total:6.1%} {seen / total * loop_microseconds:7.0f} us  {name}"

    print("By what ran last of Picker's own (with what it called)")
    for room, seen in by_room(stacks).most_common():
        if seen * 200 > total:
            print(line(room, seen))
    print(f"The first {TOP} functions by their own time")
    for (function, where), seen in by_function(stacks).most_common(TOP):
        print(line(f"{function} ({where})", seen))


def _thread_seconds(pid: int) -> float:
    """Processor time of the main thread, which has the event loop."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(directory: Path, seconds: float, file: Path) -> float:
    os.sched_setaffinity(0, {servers.OTHER_CORE})
    async with (
        servers.engines(PODS, EVENT_MESSAGES_A_SECOND) as ports,
        servers.picker(directory, ports, ResponseObservation.ACCESS_LOG) as server,
    ):
        return await watch(server, servers.destination(ports), seconds, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where to leave the folded stacks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file = options.keep or Path(name) / "stacks"
        loop = asyncio.run(run(Path(name), options.seconds, file))
        report(loop_stacks(file.read_text()), loop)


if __name__ == "__main__":
    main()
