"""Texts to ids, by the library that is fastest among those that are exact."""

from __future__ import annotations

import importlib
import json
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import tokenizers

log = logging.getLogger(__name__)

#: Texts -> the ids of each, without any that frame a prompt.
Encode = Callable[[Sequence[str]], "list[array[int]]"]

# What tokenizers of all kinds treat in ways of their own. A library that differs anywhere here is not used.
_PROBES = (
    "",
    " ",
    "  two  spaces   three    four ",
    "\n\n \n\t\tTabs\r\n\r\nand returns \n",
    "It's what they'll do, I'VE said; we'd've known. 'quoted' \"too\"",
    "0 1 12 123 1234 12345 3.14159 1,000,000 0x1F 2026-11-30",
    "def f(x):\n    return {'a': [x, -1], **y}  # why?\n\n\n",
    "snake_case camelCase SCREAMING_CASE kebab-case path/to/file.py https://a.example/?q=1&r=2#s",
    "Der Hügel ist grün, die Straße führt über den Fluß. Ça été là-bas, señor.",
    "Cafe\u0301 and Caf\u00e9, \u212b and \u00c5, \ufb01ne, \u2460\u2461, \u00bd, \uff21\uff22\uff23",
    "Холм зелёный. 山上的气象站很小。丘の上の測候所は小さい。언덕 위의 작은 집",
    "هذا نص عربي مع تَشْكِيل. यह हिन्दी है। ภาษาไทยไม่มีช่องว่าง",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001d54f \U00020000",
    "\x00\x01\x1b[0m\x7f\x85\u00a0\u00ad\u200b\u2028\u3000\ufeff\ufffd",
    "...!!!???---***___===~~~ <|x|> </s> <s> [INST] <unk> \u2581 \u0120",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
)
_PROBED_TOKENS = 200


def encoder(tokenizer: tokenizers.Tokenizer) -> Encode:
    """How to encode with this tokenizer: with `fastokens`, where that is installed, can read the tokenizer, and gives
    the same ids for every probe; with its own library otherwise. Both let go of the interpreter meanwhile.
    """

    def exact(texts: Sequence[str]) -> list[array[int]]:
        encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encoded]

    try:
        # As with the other library: requests are what is done side by side, not the parts of one.
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        library: Any = importlib.import_module("fastokens")
    except ImportError:
        return exact
    try:
        fast = _fast(library, tokenizer)
        probes = [*_PROBES, *_probes_of_tokens(tokenizer)]
        if fast(probes) == exact(probes):
            return fast
        log.warning("fastokens differs from this tokenizer's own library, and is not used")
    except Exception as error:
        log.info("fastokens cannot take this tokenizer: %s", error)
    return exact


def _fast(library: Any, tokenizer: tokenizers.Tokenizer) -> Encode:
    # What frames a prompt is added elsewhere, and not every kind of it can be read.
    contents = json.loads(tokenizer.to_str()) | {"post_processor": None}
    made = library.Tokenizer.from_json_str(json.dumps(contents))

    def fast(texts: Sequence[str]) -> list[array[int]]:
        flat, offsets = made.encode_batch_flat(list(texts), add_special_tokens=False)
        ids, ends = array("I"), array("Q")
        ids.frombytes(flat)
        ends.frombytes(offsets)
        return [ids[start:end] for start, end in pairwise(ends)]

    return fast


def _probes_of_tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """The added tokens, alone and among text of all sorts."""
    tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:_PROBED_TOKENS]
    return [f"{token}a {token} b\n{token}{token}  {token}\n\n{token.lower()}" for token in tokens]
