"""Prompts as block keys."""

from __future__ import annotations

from picker.kvcache.keys import block_keys
from picker.selection.prompt_keys import PromptKeys


def test_keys_are_made_once_for_each_block_size_and_only_when_asked_for() -> None:
    made: list[int] = []

    def make(block_size: int) -> tuple[range, ...]:
        made.append(block_size)
        return (range(100 // block_size),)

    prompt = PromptKeys([100], make)
    assert made == []
    for block_size in (16, 16, 32, 16):
        prompt.blocks(block_size)
    assert made == [16, 32]


def test_keys_are_those_of_the_tokens_the_adapter_and_the_salt() -> None:
    ids = list(range(70))
    prompt = PromptKeys.of_tokens([ids, ids[:20]], adapter="lora", salt="tenant")
    whole = block_keys(ids, 16, adapter="lora", salt="tenant")
    assert list(prompt.blocks(16)[0]) == list(whole)
    assert list(prompt.blocks(16)[1]) == list(whole[:1])
    assert prompt.lengths == (70, 20)
    assert prompt.last_block(16) == whole[0]


def test_a_prompt_shorter_than_a_block_has_no_last_block() -> None:
    assert PromptKeys.of_tokens([[1, 2, 3]]).last_block(16) is None
    assert PromptKeys.unknown().last_block(16) is None
