"""One model's tokenizer: its directory's `tokenizer.json` and chat template, and prompts turned into ids with them."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from picker.requests import ChatPrompt, TextPrompts, TokenPrompts, Truncation
from picker.tokens.chunks import ChunkCache
from picker.tokens.conversation import conversation, merge_system
from picker.tokens.cutting import Cutter
from picker.tokens.encoding import encoder
from picker.tokens.sandbox import TemplateFailed
from picker.tokens.template import ChatTemplate

# Parts handed to the tokenizer in one call: between calls the caller can give up.
_PARTS_PER_CALL = 16


class NoTemplate(Exception):
    """The model directory has no chat template that a request could use, or its chat format is no template."""


class Abandoned(Exception):
    """The caller no longer wants the result."""


class ModelTokenizer:
    """Turns prompts into the ids that the engine computes for them. Thread-safe; CPU-bound."""

    def __init__(self, directory: Path, cache: ChunkCache) -> None:
        """Load from a local model directory. Raises OSError, ValueError or what the tokenizer library raises."""
        config = _read_json(directory / "tokenizer_config.json")
        model_type = _read_json(directory / "config.json").get("model_type")
        source = (directory / "tokenizer.json").read_bytes()
        contents = json.loads(source)
        if _is_rebuilt_llama(contents, config, model_type):
            contents |= _llama_as_rebuilt(config)
            source = json.dumps(contents).encode()
        self._tokenizer = tokenizers.Tokenizer.from_buffer(source)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = {
            name: token for name in _NAMED_TOKENS if (token := _content(config.get(name)))
        }
        contents.setdefault("added_tokens", []).extend(_add_configured_tokens(self._tokenizer, config))
        self._prefix, self._suffix = _frame(self._tokenizer)
        self._encode_texts = encoder(self._tokenizer)
        self._cutter = Cutter.of(contents)
        self._cache = cache
        self._id = next(_IDS)
        # The chat format of these models is code in the engine, whatever template lies beside them.
        self._templates = (
            {}
            if model_type == "gpt_oss"
            else {name: _compiled(source) for name, source in _template_sources(directory, config).items()}
        )

    def encode_prompt(
        self,
        prompt: TextPrompts | TokenPrompts | ChatPrompt,
        *,
        template_seconds: float = 10.0,
        template_characters: int = 64 << 20,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> tuple[array[int], ...]:
        """The ids of each prompt of the batch.

        Raises NoTemplate, TemplateFailed, UnsupportedContent (media), Abandoned; anything else is a fault of the
        tokenizer or of text it cannot take (lone surrogates).
        """
        match prompt:
            case TokenPrompts(prompts):
                batch = prompts
            case TextPrompts(texts, special):
                batch = tuple(
                    self._framed(self._encode(text, abandoned), special, prompt.truncation) for text in texts
                )
            case ChatPrompt():
                text = self.render(prompt, max_seconds=template_seconds, max_characters=template_characters)
                ids = self._encode(text, abandoned)
                batch = (self._framed(ids, prompt.add_special_tokens, prompt.truncation),)
        return truncate(batch, prompt.truncation)

    def render(self, prompt: ChatPrompt, *, max_seconds: float = 10.0, max_characters: int = 64 << 20) -> str:
        """The text of a conversation. Raises NoTemplate, TemplateFailed, UnsupportedContent."""
        template = self._template_for(prompt)
        messages = prompt.messages
        if prompt.messages_api and not template.accepts_later_system:
            messages = merge_system(messages)
        try:
            prepared = conversation(messages, as_parts=template.wants_parts, template_source=template.source)
        except (TypeError, ValueError, KeyError) as error:
            raise TemplateFailed(ascii(str(error)[:200])[1:-1]) from None
        variables = {**self._special_tokens, **_template_variables(prompt.template_kwargs, template)}
        stops_thinking = prompt.messages_api and prompt.template_kwargs.get("reasoning_effort") == "none"
        if stops_thinking and not template.can_stop_thinking:
            # The engine then asks for as little thinking as it can.
            variables |= _template_variables({"reasoning_effort": "low", "enable_thinking": True}, template)
        return template.render(
            prepared,
            tools=prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            variables=variables,
            max_seconds=max_seconds,
            max_characters=max_characters,
        )

    def _template_for(self, prompt: ChatPrompt) -> ChatTemplate:
        template = self._templates.get("default")
        if prompt.tools is not None:
            template = self._templates.get("tool_use", template)
        if template is None or prompt.own_template:
            raise NoTemplate
        if isinstance(template, TemplateFailed):
            raise TemplateFailed(str(template))
        return template

    def _framed(self, ids: array[int], special: bool, truncation: Truncation | None) -> array[int]:
        """The ids with what the post-processor adds, and with room made for it where the tokenizer truncates."""
        if not special:
            return ids
        room = truncation.keep - len(self._prefix) - len(self._suffix) if truncation else 0
        if truncation is not None and truncation.keeps_frame and room >= 0:
            ids = _kept(ids, room, truncation.right)
        return array("I", self._prefix) + ids + array("I", self._suffix)

    def _encode(self, text: str, abandoned: Callable[[], bool]) -> array[int]:
        """The ids of a text alone."""
        parts = list(self._cutter.parts(text))
        found = self._cache.find(self._id, parts)
        missing = [at for at, known in enumerate(found) if known is None]
        for batch in _batches(missing):
            if abandoned():
                raise Abandoned
            texts = [parts[at] for at in batch]
            fresh = self._encode_texts(texts)
            self._cache.store(self._id, zip(texts, fresh, strict=True))
            for at, part_ids in zip(batch, fresh, strict=True):
                found[at] = part_ids
        ids = array("I")
        for known in found:
            ids.extend(known or ())
        return ids


def _batches(positions: list[int]) -> list[list[int]]:
    return [positions[at : at + _PARTS_PER_CALL] for at in range(0, len(positions), _PARTS_PER_CALL)]


_IDS = itertools.count()


def truncate(prompts: tuple[array[int], ...], truncation: Truncation | None) -> tuple[array[int], ...]:
    """Keep the last ids of each prompt, or the first, as the request asks."""
    if truncation is None:
        return prompts
    return tuple(_kept(ids, truncation.keep, truncation.right) for ids in prompts)


def _kept(ids: array[int], count: int, right: bool) -> array[int]:
    """At most `count` of the ids: the last ones, or the first ones where the right end is cut."""
    return ids[:count] if right else ids[max(len(ids) - count, 0) :]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold an object")
    return value


_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _content(token: Any) -> str | None:
    """The text of a token, given as such or as an object."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _add_configured_tokens(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Special tokens that only the configuration names become added tokens, as the engine makes them; returned as
    `tokenizer.json` would hold them."""
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    given: list[Any] = [
        token for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=_by_id)
    ]
    given += [token for name, token in config.items() if name.endswith("_token")]
    given += listed.values() if isinstance(listed, Mapping) else listed
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing: dict[str, dict[str, Any]] = {}
    for token in given:
        if (content := _content(token)) and content not in present:
            flags = token if isinstance(token, Mapping) else {}
            missing[content] = {
                "content": content,
                "special": flags.get("special", True),
                **{
                    flag: flags.get(flag, False) for flag in ("single_word", "lstrip", "rstrip", "normalized")
                },
            }
    for token in missing.values():
        tokenizer.add_tokens([tokenizers.AddedToken(**token)])
    return list(missing.values())


def _by_id(item: tuple[str, Any]) -> int:
    return int(item[0])


def _is_rebuilt_llama(contents: Mapping[str, Any], config: Mapping[str, Any], model_type: str | None) -> bool:
    """Whether the engine does not use this `tokenizer.json` as it stands.

    transformers 5 makes SentencePiece tokenizers of the Llama class anew from their vocabulary; they then treat white
    space at the beginning of a text, and text behind special tokens, in another way than the file says.
    """
    return (
        config.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast")
        and model_type in (None, "llama", "mistral", "mixtral")
        and contents.get("pre_tokenizer") is None
        and [item.get("type") for item in (contents.get("normalizer") or {}).get("normalizers", ())]
        == ["Prepend", "Replace"]
    )


def _llama_as_rebuilt(config: Mapping[str, Any]) -> dict[str, Any]:
    scheme = (
        "never" if config.get("add_prefix_space") is False else "always" if config.get("legacy") else "first"
    )
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": metaspace}


def _frame(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    candidates: set[int] | None = None
    extra: list[int] = []
    for probe in ("a", "b c", "1"):
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        framed = tokenizer.encode(probe, add_special_tokens=True).ids
        places = {at for at in range(len(framed) - len(bare) + 1) if framed[at : at + len(bare)] == bare}
        candidates = places if candidates is None else candidates & places
        at = min(candidates, default=0)
        extra = framed[:at] + framed[at + len(bare) :]
    if not candidates:
        raise ValueError("the tokenizer's post-processor does more than add tokens at the ends")
    return extra[: min(candidates)], extra[min(candidates) :]


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: the file beside the tokenizer goes before its configuration."""
    sources = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        sources.update({item["name"]: item["template"] for item in given})
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text("utf-8")
    file = directory / "chat_template.jinja"
    if file.exists():
        sources["default"] = file.read_text("utf-8")
    return sources


def _compiled(source: str) -> ChatTemplate | TemplateFailed:
    """The template, or why it cannot be used: that is the requests' problem, not the tokenizer's."""
    try:
        return ChatTemplate(source)
    except TemplateFailed as error:
        return error


def _template_variables(kwargs: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """What of a request's own variables the template gets: those that it reads; never another conversation."""
    return {
        name: value
        for name, value in kwargs.items()
        if name in template.variables and name not in ("messages", "tools", "add_generation_prompt")
    }
