"""`python -m tests.fuzz [--seconds N] [--seed N] [target ...]`: fuzz each target for a while.

With atheris installed (`pip install atheris`, where it has a wheel) the search is led by coverage. Without it, good
inputs are mutated at random from a seed that is printed. A find is an exception that the boundary does not promise,
or an input that takes longer than five seconds; it is written beside the corpus in `tests/.artifacts/fuzz`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tests.fuzz.targets import ROOT, TARGETS

ARTIFACTS = ROOT / "tests" / ".artifacts" / "fuzz"
SLOW_SECONDS = 5.0
GROWTH_BYTES = 200 * 1024 * 1024


class TooSlow(AssertionError):
    pass


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="target", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--unguided", action="store_true", help="without atheris, even where it is installed")
    options = parser.parse_args()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    found = False
    for name in options.targets or TARGETS:
        if importlib.util.find_spec("atheris") is not None and not options.unguided:
            found |= not _guided(name, options.seconds)
        else:
            seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
            found |= not _unguided(name, options.seconds, seed)
    return int(found)


# Without atheris


def _unguided(name: str, seconds: float, seed: int) -> bool:
    """Mutate good inputs until the time is over. False: something was found."""
    target, dice = TARGETS[name], random.Random(seed)
    seeds = list(target.seeds())
    for good in seeds:
        target.run(good)
    before, runs, end = _peak_bytes(), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutated(dice.choice(seeds), seeds, target.words, dice)
        runs += 1
        try:
            with _alarm():
                target.run(data)
        except Exception as error:
            path = _keep(name, data)
            print(f"{name}: {type(error).__name__}: {error}\n  input: {path}, seed {seed}", flush=True)
            return False
    grown = _peak_bytes() - before
    print(f"{name}: {runs} runs, seed {seed}, grew by {grown >> 20} MiB", flush=True)
    return grown < GROWTH_BYTES


def mutated(data: bytes, seeds: list[bytes], words: tuple[bytes, ...], dice: random.Random) -> bytes:
    """One to eight small changes."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 8)):
        at = dice.randint(0, len(changed))
        to = min(len(changed), at + dice.randint(0, 8))
        match dice.randrange(7):
            case 0:
                changed[at:to] = dice.randbytes(dice.randint(0, 8))
            case 1:
                del changed[at:to]
            case 2 if changed:
                changed[at % len(changed)] ^= 1 << dice.randrange(8)
            case 3 if words:
                changed[at:at] = dice.choice(words)
            case 4:
                changed[at:at] = changed[at:to] * dice.randint(1, 300)
            case 5:
                other = dice.choice(seeds)
                changed[at:] = other[dice.randint(0, len(other)) :]
            case _:
                changed[at:to] = str(dice.choice((0, -1, 2**31, 2**63, 2**64, 1e308))).encode()
    return bytes(changed[:65_536])


@contextmanager
def _alarm() -> Iterator[None]:
    def raise_too_slow(_: int, __: FrameType | None) -> None:
        raise TooSlow(f"longer than {SLOW_SECONDS:.0f} s")

    signal.signal(signal.SIGALRM, raise_too_slow)
    signal.setitimer(signal.ITIMER_REAL, SLOW_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _keep(name: str, data: bytes) -> str:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    path = ARTIFACTS / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return str(path.relative_to(ROOT))


# With atheris


def _guided(name: str, seconds: float) -> bool:
    """In a process of its own: libFuzzer ends it. False: something was found."""
    corpus = ARTIFACTS / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, good in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(good)
    words = ARTIFACTS / f"{name}.dict"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in TARGETS[name].words))
    command = [
        *(sys.executable, "-m", "tests.fuzz.guided", name, str(corpus)),
        f"-max_total_time={max(1, round(seconds))}",
        f"-timeout={SLOW_SECONDS:.0f}",
        "-max_len=65536",
        "-rss_limit_mb=1024",
        "-print_final_stats=1",
        *([f"-dict={words}"] if TARGETS[name].words else []),
        f"-artifact_prefix={ARTIFACTS / name}-",
    ]
    limit = seconds + 120
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit, check=False)
    report = [line for line in result.stderr.splitlines() if line.startswith("stat::")]
    figures = dict(line.removeprefix("stat::").split(":", 1) for line in report)
    runs = figures.get("number_of_executed_units", "?").strip()
    peak = figures.get("peak_rss_mb", "?").strip()
    print(f"{name}: {runs} runs, led by coverage, at most {peak} MiB", flush=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if not line.startswith("INFO: Instr")]
        print(result.stdout[-3000:], *lines[-40:], sep="\n", flush=True)
    return result.returncode == 0


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    sys.exit(main())
