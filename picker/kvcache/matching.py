"""How much of a prompt's chain of blocks each endpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple


class Tier(IntEnum):
    """Where a block is kept, best first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


#: What a cached block is worth against computing it anew.
DEVICE_WEIGHT, HOST_WEIGHT, DISK_WEIGHT = 1.0, 0.75, 0.25


class PrefixMatch(NamedTuple):
    """Blocks of a prompt that one endpoint holds, contiguous from block 0, each counted once at its best
    tier.
    """

    device: int
    host: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk

    @property
    def weighted(self) -> float:
        """The match in blocks, slower tiers counting for less."""
        return self.device * DEVICE_WEIGHT + self.host * HOST_WEIGHT + self.disk * DISK_WEIGHT


# The same few matches are found again and again.
_match = lru_cache(8192)(PrefixMatch)


def match_prefixes(
    keys: Iterable[int],
    mask: int,
    device: Mapping[int, int],
    host: Mapping[int, int],
    disk: Mapping[int, int],
) -> dict[int, PrefixMatch]:
    """Slot -> match, for the slots of `mask` that hold at least block 0. `device` and so on: key -> slots' bits.

    One pass over the keys that ends at the first block which nobody left has. It does work for a slot only where
    the slot's run ends or moves to another tier, so the usual cost is one look-up and one `and` per block.
    """
    if host or disk:
        return _match_in_tiers(keys, mask, device, host, disk)
    return match_on_device(keys, mask, device)


def match_on_device(keys: Iterable[int], mask: int, device: Mapping[int, int]) -> dict[int, PrefixMatch]:
    """As `match_prefixes`, where nothing is anywhere else."""
    matches: dict[int, PrefixMatch] = {}
    alive = mask  # slots that held every block so far
    depth = 0
    for key in keys:
        held = device.get(key, 0) & alive
        if held != alive:
            if depth:
                match = _match(depth)
                ended = alive ^ held
                while ended:
                    low = ended & -ended
                    matches[low.bit_length() - 1] = match
                    ended ^= low
            if not held:
                return matches
            alive = held
        depth += 1
    if depth:
        matches.update(dict.fromkeys(slots_of(alive), _match(depth)))
    return matches


def match_slot(keys: Iterable[int], held: Mapping[int, int]) -> PrefixMatch | None:
    """As `match_prefixes` for one slot, by its own blocks. `held`: key -> bits of tiers."""
    counts = [0, 0, 0]
    for key in keys:
        tiers = held.get(key)
        if tiers is None:
            break
        counts[(tiers & -tiers).bit_length() - 1] += 1
    return PrefixMatch(*counts) if any(counts) else None


def _match_in_tiers(
    keys: Iterable[int],
    mask: int,
    device: Mapping[int, int],
    host: Mapping[int, int],
    disk: Mapping[int, int],
) -> dict[int, PrefixMatch]:
    matches: dict[int, PrefixMatch] = {}
    alive = mask
    at_host = at_disk = 0  # of these, the ones whose latest block was only there
    host_blocks: dict[int, int] = {}
    disk_blocks: dict[int, int] = {}
    depth = 0
    for key in keys:
        on_device = device.get(key, 0) & alive
        if on_device == alive ^ at_host and not at_disk and host.get(key, 0) & at_host == at_host:
            # Everybody goes on where they are.
            depth += 1
            continue
        on_host = host.get(key, 0) & alive & ~on_device
        on_disk = disk.get(key, 0) & alive & ~on_device & ~on_host
        _turn(host_blocks, at_host, on_host, depth)
        _turn(disk_blocks, at_disk, on_disk, depth)
        at_host, at_disk = on_host, on_disk
        held = on_device | on_host | on_disk
        if depth:
            _finish(matches, alive ^ held, depth, host_blocks, disk_blocks)
        if not held:
            return matches
        alive = held
        depth += 1
    if depth:
        _turn(host_blocks, at_host, 0, depth)
        _turn(disk_blocks, at_disk, 0, depth)
        _finish(matches, alive, depth, host_blocks, disk_blocks)
    return matches


@lru_cache(1024)
def slots_of(mask: int) -> tuple[int, ...]:
    """The slots whose bits are set, lowest first."""
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return tuple(slots)


def _turn(counts: dict[int, int], before: int, after: int, depth: int) -> None:
    """Count runs in a tier by their ends: a run that starts at block s and ends before block e adds e - s."""
    if before == after:
        return
    for slot in slots_of(after & ~before):
        counts[slot] = counts.get(slot, 0) - depth
    for slot in slots_of(before & ~after):
        counts[slot] += depth


def _finish(
    matches: dict[int, PrefixMatch],
    ended: int,
    depth: int,
    host_blocks: Mapping[int, int],
    disk_blocks: Mapping[int, int],
) -> None:
    """Record the match of slots that held `depth` blocks and no more."""
    for slot in slots_of(ended):
        on_host, on_disk = host_blocks.get(slot, 0), disk_blocks.get(slot, 0)
        matches[slot] = _match(depth - on_host - on_disk, on_host, on_disk)
