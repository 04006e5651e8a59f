"""Costs of the KV index: look-ups, events, memory; side by side with another router's radix tree where it
installs.

    python -m tests.benchmarks.bench_kvcache [--no-peer]

The peer is `RadixTree` of `ai-dynamo-runtime` (native code behind a Python binding), installed into `.cache/`
at the first run. Figures are of this machine and this moment; the ratios are what counts.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from picker.kvcache.engine_blocks import EngineBlocks
from picker.kvcache.events import BlockStored
from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys, root_key
from picker.kvcache.matching import PrefixMatch, Tier
from picker.kvcache.stream import EventStream

PEER = "ai-dynamo-runtime==1.6.1"
PEER_DIRECTORY = Path(__file__).parents[2] / ".cache" / "bench-peer"

BLOCKS = 256
SLOTS = 64
SIZE = 16
ALL = (1 << SLOTS) - 1
ROOT = root_key(SIZE, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-peer", action="store_true", help="only Picker's own figures")
    peer = None if parser.parse_args().no_peer else load_peer()
    turn = loop_nanoseconds()
    print(f"{turn:.0f} ns of processor time for a turn of an empty loop: compare runs where this is alike")
    bench_keys()
    bench_lookups(peer)
    bench_events(peer)
    bench_big_index()


def load_peer() -> Any | None:
    """The peer's module, or None with a line that says why not."""
    if not PEER_DIRECTORY.exists():
        pip = [sys.executable, "-m", "pip"]
        if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
            pip = ["uv", "pip"]
        command = [*pip, "install", "--quiet", "--no-deps", "--target", str(PEER_DIRECTORY), PEER]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"SKIPPED the comparison: {PEER} cannot be installed: {error}")
            return None
    sys.path.append(str(PEER_DIRECTORY))
    try:
        return importlib.import_module("dynamo._core")
    except ImportError as error:
        print(f"SKIPPED the comparison: {PEER} cannot be imported: {error}")
        return None


def microseconds(work: Callable[[], object], *, rounds: int = 60, repeat: int = 10) -> float:
    """The mean time of one call in the round that was disturbed least by whatever else runs here."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        times.append((time.perf_counter() - start) / repeat)
    return min(times) * 1e6


def loop_nanoseconds() -> float:
    """Processor time, as for the events: what other work takes away from this machine inflates both alike."""
    start = time.process_time()
    for _ in range(5_000_000):
        pass
    return (time.process_time() - start) * 200


def bench_keys() -> None:
    ids = list(range(BLOCKS * SIZE))
    took = microseconds(lambda: block_keys(ids, SIZE))
    print(f"block_keys       {BLOCKS} blocks of {SIZE} tokens {took:39.1f} us")


# Look-ups


def depths(name: str) -> list[int]:
    """How many blocks of the prompt each slot holds."""
    if name == "everybody has all":
        return [BLOCKS] * SLOTS
    if name == "all of different depth":
        return [(slot + 1) * BLOCKS // SLOTS for slot in range(SLOTS)]
    if name == "one slot has all":
        return [BLOCKS] + [0] * (SLOTS - 1)
    return [0] * SLOTS


def bench_lookups(peer: Any | None) -> None:
    keys = block_keys(range(BLOCKS * SIZE), SIZE)
    for name in ("everybody has all", "all of different depth", "one slot has all", "nobody has any"):
        held = depths(name)
        index = KvIndex()
        for slot, depth in enumerate(held):
            index.add(slot, keys[:depth], ROOT)
        expected = {slot: PrefixMatch(depth) for slot, depth in enumerate(held) if depth}
        assert index.find_matches(keys, ALL) == expected
        ours = microseconds(lambda index=index: index.find_matches(keys, ALL))  # type: ignore[misc]
        line = f"find_matches     {BLOCKS} blocks, {SLOTS} slots, {name:<22} {ours:8.1f} us"
        if peer is not None:
            tree = peer.RadixTree()
            for slot, depth in enumerate(held):
                if depth:
                    tree.apply_event(slot, peer_store(None, keys[:depth]))
            found = {slot: score for (slot, _rank), score in tree.find_matches(keys).scores.items()}
            assert found == {slot: depth for slot, depth in enumerate(held) if depth}
            theirs = microseconds(lambda tree=tree: tree.find_matches(keys).scores)  # type: ignore[misc]
            line += f"   peer {theirs:8.1f} us   ratio {ours / theirs:.2f}"
        print(line)
    index = KvIndex()
    for slot in range(SLOTS):
        index.add(slot, keys[: BLOCKS // 2], ROOT)
        index.add(slot, keys[BLOCKS // 2 :], keys[BLOCKS // 2 - 1], Tier.HOST)
    assert index.find_matches(keys, ALL)[5] == PrefixMatch(BLOCKS // 2, host=BLOCKS // 2)
    tiers = microseconds(lambda: index.find_matches(keys, ALL))
    print(f"find_matches     {BLOCKS} blocks, {SLOTS} slots, half of each on the host {tiers:5.1f} us")


# Events


def engine_batches(
    messages: int, blocks_each: int, *, live: int, digests: bool = False
) -> list[list[dict[str, Any]]]:
    """What an engine with room for `live` blocks says: each message stores a piece of a prompt of 32 blocks. When it
    is full, blocks go before that, one an event, the oldest prompt first and its tail first.
    """
    source = Random(1)
    prompts: deque[list[int]] = deque([[]])
    stored = 0
    batches = []

    def wire(value: int) -> int | bytes:
        return value.to_bytes(32, "big") if digests else value

    for _ in range(messages):
        if len(prompts[-1]) + blocks_each > 32:
            prompts.append([])
        parent = prompts[-1][-1] if prompts[-1] else None
        hashes = [source.getrandbits(64) for _ in range(blocks_each)]
        batch: list[dict[str, Any]] = []
        while stored + blocks_each > live:
            removed = [wire(prompts[0].pop())]
            batch.append({"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU", "group_idx": 0})
            stored -= 1
            if not prompts[0]:
                prompts.popleft()
        batch.append(
            {
                "type": "BlockStored",
                "block_hashes": [wire(value) for value in hashes],
                "parent_block_hash": None if parent is None else wire(parent),
                "token_ids": [source.randrange(150_000) for _ in range(SIZE * blocks_each)],
                "block_size": SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * blocks_each,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        batches.append(batch)
        prompts[-1] += hashes
        stored += blocks_each
    return batches


def bench_events(peer: Any | None) -> None:
    for name, messages, each, together, live, digests in (
        ("stores, 1 block a message", 30_000, 1, 1, 10**9, False),
        ("stores, 8 blocks a message", 8_000, 8, 1, 10**9, False),
        ("1 stored and 1 evicted, 16 times a message", 30_000, 1, 16, 4_000, False),
        ("the same with 32-byte hashes", 30_000, 1, 16, 4_000, True),
    ):
        single = engine_batches(messages, each, live=live, digests=digests)
        # A busy engine tells in one message what a step of its scheduler did to many requests.
        batches = [
            [event for batch in single[start : start + together] for event in batch]
            for start in range(0, messages, together)
        ]
        blocks = sum(len(event["block_hashes"]) for batch in batches for event in batch)
        payloads = [msgspec.msgpack.encode([1.0, batch, 0]) for batch in batches]
        stream = EventStream(EngineBlocks(0, KvIndex()), can_replay=False)
        gc.collect()
        start = time.process_time()
        for seq, payload in enumerate(payloads):
            stream.live(seq, payload)
        ours = blocks / (time.process_time() - start)
        stats = stream.blocks.stats
        assert stats.stored + stats.removed == blocks
        line = f"events           {name:<43} {ours:9,.0f} blocks/s"
        if peer is not None and not digests:
            tree = peer.RadixTree()
            events = [event for batch in batches for event in peer_events(batch)]
            start = time.process_time()
            for event in events:
                tree.apply_event(0, event)
            theirs = blocks / (time.process_time() - start)
            line += f"   peer {theirs:9,.0f} blocks/s   ratio {ours / theirs:.2f}"
        print(line)


def peer_store(parent: int | None, hashes: Sequence[int]) -> bytes:
    """A store as the peer's tree takes it: JSON, with the hashes of the tokens already computed."""
    blocks = [{"block_hash": value, "tokens_hash": value} for value in hashes]
    return peer_event({"stored": {"parent_hash": parent, "blocks": blocks}})


def peer_event(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode()


def peer_events(batch: list[dict[str, Any]]) -> list[bytes]:
    return [
        peer_store(event["parent_block_hash"], event["block_hashes"])
        if event["type"] == "BlockStored"
        else peer_event({"removed": {"block_hashes": event["block_hashes"]}})
        for event in batch
    ]


# A big index


PER_SLOT = 50_000
PROMPT = 64


def bench_big_index() -> None:
    """In fresh processes, so that resident memory tells the truth."""
    context = multiprocessing.get_context("spawn")
    for name, holders in (("1 slot", 1), ("4 slots", 4)):
        with context.Pool(1) as pool:
            alone, *_ = pool.apply(measure_big_index, (1_000_000, holders, False))
        with context.Pool(1) as pool:
            whole, collect, clear, sweep = pool.apply(measure_big_index, (1_000_000, holders, True))
        print(
            f"1,000,000 blocks held by {name:<8} index {alone:5.0f} MB, with the engines' hashes {whole:5.0f} MB; "
            f"garbage collection {collect:4.1f} ms longer; clearing a slot of {PER_SLOT:,} blocks {clear:5.2f} ms,"
            f" and {sweep:.0f} ms in slices"
        )


def measure_big_index(blocks: int, holders: int, engines: bool) -> tuple[float, float, float, float]:
    """MB of memory, ms that a full garbage collection takes longer, ms to clear one slot, ms to sweep what fades then.

    Prompts of 64 blocks, 50,000 blocks in each slot, every block in `holders` slots; with `engines`, stored
    through events as an engine sends them.
    """
    source = Random(2)
    gc.collect()
    collect, memory = milliseconds(gc.collect), resident_megabytes()
    index = KvIndex(max_blocks=2 * blocks, on_fading=lambda: None)
    followed = [EngineBlocks(slot, index) for slot in range(blocks * holders // PER_SLOT)] if engines else []
    for start in range(0, blocks, PROMPT):
        slots = [start // PER_SLOT * holders + holder for holder in range(holders)]
        count = min(PROMPT, blocks - start)
        tokens = [source.randrange(150_000) for _ in range(count * SIZE)]
        hashes = [source.getrandbits(64) for _ in range(count)]
        for slot in slots:
            if engines:
                # Each engine sends its own copy of a hash.
                followed[slot].apply([BlockStored([value + 0 for value in hashes], None, tokens, SIZE)])
            else:
                index.add(slot, block_keys(tokens, SIZE), ROOT)
    assert len(index) == blocks
    grown = resident_megabytes() - memory
    longer = milliseconds(gc.collect) - collect
    clear = milliseconds(followed[0].clear if engines else lambda: index.clear(0))
    return grown, longer, clear, milliseconds(lambda: index.sweep(100 * blocks))


def milliseconds(work: Callable[[], object]) -> float:
    """Processor time."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


if __name__ == "__main__":
    main()
