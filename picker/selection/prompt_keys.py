"""A request's prompts as block keys, for whatever block sizes the pool's engines use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from picker.kvcache.keys import block_keys
from picker.policy.model import CostWeights


class Prefix(Protocol):
    """A contiguous cached prefix on one endpoint, in blocks by the tier that holds them."""

    @property
    def device(self) -> int: ...

    @property
    def host(self) -> int: ...

    @property
    def disk(self) -> int: ...


class PrefixIndex(Protocol):
    """Who holds which prefix. Reading it changes nothing."""

    def find_matches(self, keys: Sequence[int], mask: int) -> Mapping[int, Prefix]: ...


class PromptKeys:
    """The prompts of one request: their lengths in tokens and, per block size, their block keys.

    Keys are made once per block size, at the first question.
    """

    __slots__ = ("_keys", "_make", "lengths")

    def __init__(self, lengths: Sequence[int], make: Callable[[int], tuple[Sequence[int], ...]]) -> None:
        self.lengths = tuple(lengths)
        self._make = make
        self._keys: dict[int, tuple[Sequence[int], ...]] = {}

    @classmethod
    def of_tokens(
        cls, prompts: Sequence[Sequence[int]], *, adapter: str | None = None, salt: str | None = None
    ) -> PromptKeys:
        def make(block_size: int) -> tuple[Sequence[int], ...]:
            return tuple(block_keys(ids, block_size, adapter=adapter, salt=salt) for ids in prompts)

        return cls([len(ids) for ids in prompts], make)

    @classmethod
    def of_keys(cls, lengths: Sequence[int], keys: Mapping[int, tuple[Sequence[int], ...]]) -> PromptKeys:
        """Keys that were made elsewhere, by block size; in any other size nothing can be matched."""
        prompt = cls(lengths, lambda block_size: tuple(() for _ in lengths))
        prompt._keys.update(keys)
        return prompt

    @classmethod
    def unknown(cls) -> PromptKeys:
        """No token ids are known: nothing can be matched."""
        return cls((), lambda block_size: ())

    def known(self) -> Mapping[int, tuple[Sequence[int], ...]]:
        """The keys that have been made so far, by block size."""
        return self._keys

    def blocks(self, block_size: int) -> tuple[Sequence[int], ...]:
        """The keys of each prompt's full blocks."""
        keys = self._keys.get(block_size)
        if keys is None:
            keys = self._keys[block_size] = self._make(block_size)
        return keys

    def last_block(self, block_size: int) -> int | None:
        """The key of the last full block: the pod that stores it has done the prefill."""
        chains = self.blocks(block_size)
        return chains[-1][-1] if chains and chains[-1] else None


def cached_tokens(
    prompt: PromptKeys,
    index: PrefixIndex,
    block_size: int,
    mask: int,
    weights: CostWeights,
    discounts: dict[int, int],
) -> dict[int, int]:
    """Tokens that each endpoint of `mask` holds of the prompts, by slot; endpoints with none are left out. A
    block in a slower tier counts for less, as `weights` say; by how many tokens less in all is added to `discounts`.

    The engine always computes a prompt's last token, so at most floor((length - 1) / block) blocks of each
    prompt count, whatever is stored (seen on a real vLLM).
    """
    found: dict[int, int] = {}
    for length, keys in zip(prompt.lengths, prompt.blocks(block_size), strict=False):
        usable = (length - 1) // block_size
        if usable <= 0:
            continue
        for slot, prefix in index.find_matches(keys, mask).items():
            blocks = prefix.device + weights.host_tier * prefix.host + weights.disk_tier * prefix.disk
            tokens = round(min(blocks, usable) * block_size)
            if tokens:
                found[slot] = found.get(slot, 0) + tokens
            if prefix.host or prefix.disk:
                whole = min(prefix.device + prefix.host + prefix.disk, usable) * block_size
                discounts[slot] = discounts.get(slot, 0) + whole - tokens
    return found
