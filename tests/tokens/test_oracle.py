"""Ids and rendered chats equal those of transformers, for every kind of tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.requests import BodyLimits, ChatPrompt, TextPrompts, parse_request
from picker.requests.prompts import Truncation
from picker.tokens.chunks import ChunkCache
from picker.tokens.model import ModelTokenizer
from tests.tokens.models import BOS_CHAT, CHATML, KINDS, save

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

# Names of chat templates, each tried with every conversation below.
TEMPLATES = {
    "chatml": CHATML,
    "bos_and_parts": BOS_CHAT,
    "generation": CHATML.replace(
        "{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"
    ),
    "alternating": """{%- for m in messages -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
    {%- if loop.index > 6 %}{% break %}{% endif -%}
    {{ '[' + m['role'] + '] ' + (m['content'] | trim) + eos_token }}
{%- endfor -%}{{ documents | tojson if documents }}{{ strftime_now('%Y') }}""",
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now> & later in Zürich",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "description": None, "parameters": None}},
]
ARGUMENTS = {"city": "Zürich", "n": 1.5}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


# What a client sends, and the same conversation with tool arguments as objects and null content as text.
CONVERSATIONS: list[tuple[dict[str, Any], list[dict[str, Any]] | None]] = [
    ({"messages": [says("user", "Hello, the wind!")]}, None),
    (
        {
            "messages": [
                says("system", "Be brief.\n"),
                says("user", "  why?  "),
                says("assistant", "so"),
                says("user", "ok"),
            ]
        },
        None,
    ),
    ({"messages": [says("user", "rain?")], "tools": TOOLS}, None),
    ({"messages": [says("user", "rain?")], "tools": []}, None),
    (
        {
            "messages": [
                says("user", "rain?"),
                says("assistant", None, tool_calls=[call(json.dumps(ARGUMENTS))]),
                says("tool", "sunny", tool_call_id="call_1"),
            ],
            "tools": TOOLS,
        },
        [
            says("user", "rain?"),
            says("assistant", "", tool_calls=[call(ARGUMENTS)]),
            says("tool", "sunny", tool_call_id="call_1"),
        ],
    ),
    (
        {"messages": [says("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]},
        [says("user", "a\nb")],
    ),
    ({"messages": [says("user", "x")], "add_generation_prompt": False}, None),
    (
        {
            "messages": [says("user", "x"), says("assistant", "The answer is ")],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        None,
    ),
    (
        {"messages": [says("user", "x")], "chat_template_kwargs": {"enable_thinking": False, "unknown": 1}},
        None,
    ),
    ({"messages": [says("user", "x")], "documents": [{"title": "t", "text": "é"}]}, None),
]


def reference(directory: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the engine hands to a template that loops over parts: tools' answers stay text."""
    return [
        message
        if message["role"] == "tool"
        else {
            **message,
            "content": [{"type": "text", "text": message["content"]}] if message["content"] else [],
        }
        for message in messages
    ]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "wordpiece", "gemma_like"])
def test_chats(kind: str, template: str, trained: Callable[[str], Any], tmp_path: Path) -> None:
    directory = save(trained(kind), tmp_path, TEMPLATES[template])
    oracle = reference(directory)
    mine = ModelTokenizer(directory, ChunkCache(0))
    compared = 0
    for body, plain in CONVERSATIONS:
        prompt = parse_request(
            "POST", "/v1/chat/completions", [], json.dumps(body).encode(), BodyLimits()
        ).prompt
        assert isinstance(prompt, ChatPrompt)
        messages = plain or body["messages"]
        if template == "bos_and_parts":
            messages = as_parts(messages)
            if isinstance(body["messages"][0]["content"], list):
                messages = body["messages"]
        options = {
            "tools": body.get("tools"),
            "documents": body.get("documents"),
            "add_generation_prompt": body.get("add_generation_prompt", True),
            "continue_final_message": body.get("continue_final_message", False),
            **body.get("chat_template_kwargs", {}),
        }
        try:
            expected = oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        except Exception as error:
            # The template refuses this one; so must it here.
            with pytest.raises(Exception, match=str(error)[:20]):
                mine.encode_prompt(prompt)
            continue
        assert mine.render(prompt) == oracle.apply_chat_template(messages, tokenize=False, **options)
        assert mine.encode_prompt(prompt)[0].tolist() == expected
        compared += 1
    assert compared >= 5


# Kinds that transformers would not load as they stand: they are made up, to provoke the cutting.
LOADABLE = sorted(set(KINDS) - {"uncuttable", "greedy_added_tokens"})

_TEXTS = st.lists(
    st.sampled_from(["the wind", " ", "\n", "Straße", "山上。", "<s>", "<|im_start|>", "it's", "12345", "é"])
    | st.text(max_size=5),
    max_size=20,
).map("".join)


@pytest.fixture(scope="session")
def both(model_directory: Callable[[str], Path]) -> Callable[[str], tuple[ModelTokenizer, Any]]:
    made: dict[str, tuple[ModelTokenizer, Any]] = {}

    def get(kind: str) -> tuple[ModelTokenizer, Any]:
        if kind not in made:
            directory = model_directory(kind)
            made[kind] = ModelTokenizer(directory, ChunkCache(1 << 20)), reference(directory)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", LOADABLE)
@settings(max_examples=50, deadline=None)
@given(text=_TEXTS)
def test_texts(kind: str, both: Callable[[str], tuple[ModelTokenizer, Any]], text: str) -> None:
    mine, oracle = both(kind)
    assert mine.encode_prompt(TextPrompts((text,)))[0].tolist() == oracle(text)["input_ids"]
    bare = TextPrompts((text,), add_special_tokens=False)
    assert mine.encode_prompt(bare)[0].tolist() == oracle(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["llama3_like", "wordpiece", "byte_bpe"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_special_tokens_survive_truncation(
    kind: str, side: str, both: Callable[[str], tuple[ModelTokenizer, Any]]
) -> None:
    """Cut by the tokenizer, as where a request names no side (seen on a real engine)."""
    mine, oracle = both(kind)
    oracle.truncation_side = side
    text = "the wind and the rain of a long day"
    for keep in (2, 3, 7, 1000):
        truncation = Truncation(keep, right=side == "right")
        ids = mine.encode_prompt(TextPrompts((text,), truncation=truncation))[0].tolist()
        cut = oracle(text, truncation=True, max_length=keep)
        assert ids == cut["input_ids"]
        given = Truncation(keep, right=side == "right", keeps_frame=False)
        ids = mine.encode_prompt(TextPrompts((text,), truncation=given))[0].tolist()
        whole = oracle(text)["input_ids"]
        assert ids == (whole[:keep] if side == "right" else whole[-keep:])


@pytest.mark.parametrize("kind", ["llama3_like", "byte_bpe"])
def test_bos_and_eos_are_what_the_tokenizers_file_says(
    kind: str, trained: Callable[[str], Any], tmp_path: Path
) -> None:
    """The engine's library does not heed `add_bos_token` beside a `tokenizer.json`."""
    directory = save(trained(kind), tmp_path, add_bos_token=kind == "byte_bpe", add_eos_token=True)
    ids = ModelTokenizer(directory, ChunkCache(0)).encode_prompt(TextPrompts(("the wind",)))[0].tolist()
    assert ids == reference(directory)("the wind")["input_ids"]
    assert (ids[0] == 0) is (kind == "llama3_like")


def test_tokens_that_only_the_configuration_names(trained: Callable[[str], Any], tmp_path: Path) -> None:
    decoder = {"2000": {"content": "[new]", "special": True, "lstrip": True, "normalized": False}}
    more: dict[str, Any] = {
        "added_tokens_decoder": decoder,
        "pad_token": "[pad]",
        "additional_special_tokens": ["[extra]"],
    }
    directory = save(trained("byte_bpe"), tmp_path, **more)
    mine, oracle = ModelTokenizer(directory, ChunkCache(0)), reference(directory)
    for text in ("the [new]wind", "the wind[pad] ", "[extra][new]", "the wind [new]" * 400):
        assert mine.encode_prompt(TextPrompts((text,)))[0].tolist() == oracle(text)["input_ids"]


def test_a_template_that_writes_bos_and_a_tokenizer_that_adds_it_give_one(
    trained: Callable[[str], Any], tmp_path: Path
) -> None:
    directory = save(trained("llama3_like"), tmp_path, BOS_CHAT)
    mine = ModelTokenizer(directory, ChunkCache(0))
    ids = mine.encode_prompt(ChatPrompt((says("user", "x"),)))[0].tolist()
    assert ids.count(0) == 1
    doubled = mine.encode_prompt(ChatPrompt((says("user", "x"),), add_special_tokens=True))[0].tolist()
    assert doubled == [0, *ids]


@pytest.mark.parametrize("legacy", [True, False])
def test_llamas_class_is_rebuilt_as_the_engine_rebuilds_it(
    legacy: bool, trained: Callable[[str], Any], tmp_path: Path
) -> None:
    directory = save(
        trained("llama2_like"), tmp_path, tokenizer_class="LlamaTokenizer", legacy=legacy, add_bos_token=True
    )
    mine = ModelTokenizer(directory, ChunkCache(0))
    oracle = transformers.AutoTokenizer.from_pretrained(str(directory))
    for text in ("the wind", "  the wind", "</s>the wind", "x</s>  the wind " * 300, ""):
        assert mine.encode_prompt(TextPrompts((text,)))[0].tolist() == oracle(text)["input_ids"]


def test_templates_by_name_and_in_files(trained: Callable[[str], Any], tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    directory = save(trained("byte_bpe"), tmp_path, None, chat_template=named)
    user = says("user", "x")

    def rendered(**options: Any) -> str:
        return ModelTokenizer(directory, ChunkCache(0)).render(ChatPrompt((user,), **options))

    assert (rendered(), rendered(tools=({},))) == ("plain", "with tools")
    (directory / "chat_template.jinja").write_text("from the file")
    assert rendered() == "from the file"
