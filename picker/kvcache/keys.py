"""Block keys: Picker's own names for blocks of a prompt, the same from a request and from an engine event.

A key is a 64-bit integer, chained: it names the tokens of its block and of every block before it, the
adapter, the cache salt and the media in them. Engines have hashes of their own, which can not be computed
from outside (they take in secrets such as the adapter's path), so both sides compute these instead.

The chain starts from a root that names the block size and the adapter. Blocks of different sizes therefore
never share a key, even where their tokens are equal.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

_TOKEN_BYTES = 4
_LITTLE_ENDIAN = sys.byteorder == "little"

#: What a block holds beside its tokens: media ids in order of appearance, then (first block only) the salt.
Extra = tuple[str, ...]


def block_keys(
    token_ids: Sequence[int],
    block_size: int,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    media: Mapping[int, Sequence[str]] | None = None,
) -> list[int]:
    """The keys of the full blocks of a prompt; the tokens after the last full block have none.

    `block_size` is in tokens, at least 1. `adapter` is the LoRA name, None for the base model. `media` gives,
    per block number, the ids of the images and the like that overlap the block, in order of appearance.
    Raises ValueError for a block size below 1 or a token id outside 0..2^32-1.
    """
    if block_size < 1:
        raise ValueError(f"block size {block_size} is not positive")
    count = len(token_ids) // block_size
    extras: dict[int, Extra] = {number: tuple(ids) for number, ids in (media or {}).items() if number < count}
    if salt and count:
        extras[0] = (*extras.get(0, ()), salt)
    return chain(root_key(block_size, adapter), pack_tokens(token_ids), block_size, extras)


def root_key(block_size: int, adapter: str | None) -> int:
    """The parent of first blocks. It names no block and is in no index."""
    name = b"" if adapter is None else b"+" + _encode(adapter)
    return xxh3_64_intdigest(block_size.to_bytes(8, "little") + name)


def chain(
    parent: int, packed: bytes, block_size: int, extras: Mapping[int, Extra] | None = None
) -> list[int]:
    """The keys of consecutive full blocks that follow the block (or root) `parent`.

    `packed` is from `pack_tokens`. `extras` is by block number, counted from the first block of `packed`.
    """
    step = block_size * _TOKEN_BYTES
    keys: list[int] = []
    for start in range(0, len(packed) - step + 1, step):
        block = packed[start : start + step]
        if extras and (extra := extras.get(start // step)):
            block += _pack_extra(extra)
        parent = xxh3_64_intdigest(block, parent)
        keys.append(parent)
    return keys


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers. Raises ValueError where one does not fit."""
    try:
        # Copying also takes other typecodes and tuples to the width that the chain is defined on.
        packed = (
            token_ids if type(token_ids) is array and token_ids.typecode == "I" else array("I", token_ids)
        )
    except (OverflowError, TypeError) as error:
        raise ValueError(f"not a token id: {error}") from None
    if not _LITTLE_ENDIAN:
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def _pack_extra(extra: Extra) -> bytes:
    """Length-prefixed, so that no two different tuples give the same bytes."""
    parts = [_encode(text) for text in extra]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _encode(text: str) -> bytes:
    # Client text can hold lone surrogates; they must make a key, not an error.
    return text.encode("utf-8", "surrogatepass")
