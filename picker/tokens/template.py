"""Chat templates: rendered in a sandbox as the engines render them, bounded in time and output."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from picker.tokens.content_format import iterates_content
from picker.tokens.sandbox import (
    TemplateFailed,
    bounded,
    check_deadline,
    check_size,
    environment,
    with_bounded_steps,
)

_EFFORTS = ("low", "medium", "high", "xhigh", "max")

# What trying a template out may take.
_PROBE_SECONDS = 0.25
_PROBE_CHARACTERS = 1 << 20

# Marks the end of the message that is to be continued; cut off again after rendering.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """One compiled template. What can be learned of it is learned at once, so that rendering is all that is left;
    that is thread-safe.

    Semantics as in transformers and vLLM: trimmed blocks, loop controls, `tojson` that keeps non-ASCII text and key
    order, `raise_exception`, `strftime_now`, and the `generation` tag, which renders its body.
    """

    def __init__(self, source: str) -> None:
        """Compile `source`. Raises TemplateFailed."""
        self.source = source
        try:
            syntax = _ENVIRONMENT.parse(source)
            self.wants_parts = iterates_content(syntax)
            """Whether the template loops over a message's content, so that it is handed lists of parts."""
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(syntax))
            """The names that the template reads from outside."""
            self._template = _ENVIRONMENT.from_string(with_bounded_steps(syntax))
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise TemplateFailed(_reason(error)) from None
        self.accepts_later_system = self._accepts_later_system()
        """Whether a system message may follow others."""
        self.can_stop_thinking = self._can_stop_thinking()
        """Whether the effort "none" is understood: it renders, and unlike every other effort."""

    def _accepts_later_system(self) -> bool:
        """Tried out as the engine does: without its own functions, tags and special tokens, so that a template which
        needs those counts as refusing."""
        turn = [{"role": "system", "content": "t"}, {"role": "user", "content": "t"}]
        missing = {name: _ENVIRONMENT.undefined(name=name) for name in ("raise_exception", "strftime_now")}
        try:
            with bounded(_PROBE_SECONDS, _PROBE_CHARACTERS):
                self._template.render(messages=turn * 2, add_generation_prompt=False, **missing)
        except Exception:
            return False
        return re.search(r"\{%-?\s*generation\b", self.source) is None

    def _can_stop_thinking(self) -> bool:
        none = self._with_effort("none")
        return none is not None and all(self._with_effort(effort) != none for effort in _EFFORTS)

    def _with_effort(self, effort: str) -> str | None:
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        try:
            return self.render(
                [{"role": "user", "content": "Hi"}],
                variables=variables,
                max_seconds=_PROBE_SECONDS,
                max_characters=_PROBE_CHARACTERS,
            )
        except TemplateFailed:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        max_seconds: float = 10.0,
        max_characters: int = 64 << 20,
    ) -> str:
        """Render a conversation. Raises TemplateFailed. CPU-bound: call it in a worker thread where it may be long."""
        if continue_final_message and add_generation_prompt:
            raise TemplateFailed("a final message is either continued or answered")
        final = ""
        if continue_final_message:
            messages, final = _mark_final(messages)
        given = {
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with bounded(max_seconds, max_characters):
                rendered = self._generate(given, max_characters)
        except TemplateFailed:
            raise
        except Exception as error:
            # Templates run on data of any shape: whatever they raise means that they do not fit it.
            raise TemplateFailed(_reason(error)) from None
        return _cut_after_final(rendered, final) if continue_final_message else rendered

    def _generate(self, variables: dict[str, Any], max_characters: int) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > max_characters:
                check_size(size)
            check_deadline()
            pieces.append(piece)
        return "".join(pieces)


def _mark_final(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Put the mark behind the text of the last message; also returns that text."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_MARK
        return [*messages[:-1], last], content
    parts = [dict(part) for part in content] if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_MARK
            last["content"] = parts
            return [*messages[:-1], last], text
    raise TemplateFailed("the final message has no text to continue")


def _cut_after_final(rendered: str, final: str) -> str:
    """What stands before the mark; where the template trimmed the message, trimmed as well."""
    at = rendered.rfind(_CONTINUE_MARK.strip())
    if at < 0 or final.strip() not in rendered:
        raise TemplateFailed("the template leaves out the message to continue")
    kept = rendered[:at]
    return kept if rendered.startswith(_CONTINUE_MARK, at) else kept.rstrip()


_ENVIRONMENT = environment()


def _reason(error: BaseException) -> str:
    return ascii(f"{type(error).__name__}: {error}"[:300])[1:-1]
