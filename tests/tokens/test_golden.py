"""Every prompt that a real vLLM recorded has the ids that it computed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picker.requests import BodyLimits, parse_request
from picker.tokens import Tokenizers
from tests.tokens.models import GOLDEN

RECORDINGS = ["recording.jsonl", "recording-after-restart.jsonl"]


def recorded(name: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (GOLDEN / name).read_text().splitlines())
    return [line for line in lines if line["kind"] == "request"]


@pytest.mark.parametrize("name", RECORDINGS)
async def test_ids_are_the_engines(name: str) -> None:
    tokens = Tokenizers({"tiny": GOLDEN / "tokenizer"})
    await tokens.load()
    try:
        requests = recorded(name)
        assert requests
        for request in requests:
            body = json.dumps(request["body"]).encode()
            read = parse_request("POST", request["endpoint"], [], body, BodyLimits())
            count = await tokens.tokenize(read)
            assert [ids.tolist() for ids in count.ids] == [request["prompt_token_ids"]], request["id"]
    finally:
        await tokens.close()
