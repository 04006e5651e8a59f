"""Request bodies to token ids, as vLLM's completions and chat endpoints make them, for the mock engine."""

from __future__ import annotations

import json
import random
import zlib
from array import array
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

DEFAULT_TOKENIZER = Path(__file__).parent / "tokenizer"


class PromptError(ValueError):
    """The body holds no usable prompt. The text is for the client."""


class PromptEncoder:
    """A tokenizer directory (tokenizer.json, tokenizer_config.json with a chat template) at work."""

    def __init__(self, directory: Path = DEFAULT_TOKENIZER) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = json.loads((directory / "tokenizer_config.json").read_text())
        self._special = {name: config.get(name) for name in ("bos_token", "eos_token")}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        template = config.get("chat_template")
        self._template = environment.from_string(template) if isinstance(template, str) else None
        self.vocabulary: int = self._tokenizer.get_vocab_size()
        self._words = self._readable_ids()

    def completion(self, prompt: object) -> list[list[int]]:
        """A completions `prompt`: text, ids, or a list of either. One list of ids for each prompt."""
        match prompt:
            case str():
                return [self.text(prompt)]
            case [int(), *_]:
                return [self._checked(prompt)]
            case [str() | list(), *_]:
                return [self.text(item) if isinstance(item, str) else self._checked(item) for item in prompt]
            case _:
                raise PromptError("prompt must be a string, a list of token ids, or a list of either")

    def chat(self, body: dict[str, Any]) -> list[int]:
        """The ids of a chat body's `messages` (and `tools`) in the model's template."""
        if self._template is None:
            raise PromptError("this model has no chat template")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise PromptError("messages must be a list with at least one message")
        try:
            text = self._template.render(
                messages=[_flat(message) for message in messages],
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                **self._special,
                **(body.get("chat_template_kwargs") or {}),
            )
        except (TemplateError, TypeError) as error:
            raise PromptError(f"the chat template failed: {error}") from error
        return self.text(text, special=False)

    def text(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def noise(self, prompt: list[int], tokens: int) -> list[int]:
        """Generated ids: readable, random, and always the same for the same prompt."""
        seed = zlib.crc32(array("I", prompt).tobytes())
        return random.Random(seed).choices(self._words, k=tokens)

    def _checked(self, ids: Any) -> list[int]:
        if not isinstance(ids, list) or not ids:
            raise PromptError("a prompt needs at least one token")
        for token in ids:
            if type(token) is not int or not 0 <= token < self.vocabulary:
                raise PromptError(f"token id {token!r} is out of vocabulary")
        return ids

    def _readable_ids(self) -> list[int]:
        words = [
            identifier
            for identifier in range(self.vocabulary)
            if (word := self._tokenizer.decode([identifier])).startswith(" ") and word[1:].isalpha()
        ]
        return words or list(range(self.vocabulary))


def _flat(message: object) -> dict[str, Any]:
    """A message whose content is plain text: the text parts of a list, one a line."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError("each message must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    return {**message, "content": "" if content is None else content}
