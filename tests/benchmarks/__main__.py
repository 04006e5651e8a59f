"""Run every benchmark, one after another, and with --write put what they print into tests/benchmarks/README.md.

    python -m tests.benchmarks            # print
    python -m tests.benchmarks --write    # and write the README anew
    python -m tests.benchmarks --write bench_queue    # only this section of it

Every figure stands beside a baseline or a target of the same run: the machines that this runs on are small, shared
and noisy, so compare ratios, not single times.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

BENCHMARKS = {
    "bench_extproc": "The ext_proc path: Picker's server against a bare echo server",
    "bench_whole": "The whole pipeline on one core: what a request costs between its arrival and its answer",
    "bench_gateway": "Behind a real Envoy with an open-loop client: what Picker adds",
    "bench_profile": "Where that time goes, by py-spy: the first ten",
    "bench_faces": "Several processes: decisions by the core's socket, and a request's cost on either side",
    "bench_queue": "The queue and the choice",
    "bench_scale": "How costs grow with pods, waiting requests, classes, lanes and blocks",
    "bench_kvcache": "The KV index and its events",
    "bench_tokens": "Tokens: a long prompt seen before, and the event loop under many of them",
    "bench_fairness": "Fairness between clients on the VTC paper's trace",
}
README = Path(__file__).parent / "README.md"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="names of benchmarks; all without any")
    parser.add_argument("--write", action="store_true", help="write tests/benchmarks/README.md anew")
    arguments = parser.parse_args()
    chosen = arguments.only or list(BENCHMARKS)
    if unknown := set(chosen) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    failed, sections = 0, _written() if arguments.only else {}
    for name in chosen:
        print(f"\n=== {BENCHMARKS[name]} ({name})", flush=True)
        output, status = _run(name)
        failed += status != 0
        sections[name] = f"    python -m tests.benchmarks.{name}\n\n```text\n{output.strip()}\n```\n"
    if arguments.write and not failed:
        parts = [f"## {BENCHMARKS[name]}\n\n{text}" for name, text in _in_order(sections)]
        README.write_text("\n".join([_introduction(), *parts]))
        print(f"\nwritten: {README}")
    return 1 if failed else 0


def _run(name: str) -> tuple[str, int]:
    """Its output, shown as it comes, and its exit status."""
    lines: list[str] = []
    command = [sys.executable, "-m", f"tests.benchmarks.{name}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return "".join(lines), process.returncode


def _written() -> dict[str, str]:
    """The sections that the README has."""
    names = {title: name for name, title in BENCHMARKS.items()}
    parts = (part.split("\n\n", 1) for part in README.read_text().split("\n## ")[1:])
    return {names[title]: text for title, text in parts if title in names}


def _in_order(sections: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, sections[name]) for name in BENCHMARKS if name in sections]


def _introduction() -> str:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        "# Benchmarks\n\n"
        "Written by one command, `make bench ARGS=--write`; each section's own command is above its figures, and with\n"
        "its name behind `--write` it alone is written anew. Compare ratios within a section: the machine is small,\n"
        "shared and noisy.\n\n"
        f"Machine: {_processor()}, {os.cpu_count()} cores, load average before the run's end {load};"
        f" Python {platform.python_version()}.\n"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


if __name__ == "__main__":
    sys.exit(main())
