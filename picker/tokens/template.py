"""Chat templates: rendered in a sandbox as the engines render them, bounded in time and output."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from picker.tokens.content_format import iterates_content

_EFFORTS = ("low", "medium", "high", "xhigh", "max")

# What trying a template out may take.
_PROBE_SECONDS = 0.25

# Marks the end of the message that is to be continued; cut off again after rendering.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateFailed(Exception):
    """The template refused the conversation, is broken, or passed its bounds. The message is safe to log."""


class TemplateTimeout(TemplateFailed):
    """The template ran longer than it may."""


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
            self._template = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise TemplateFailed(_reason(error)) from None
        self.wants_parts = iterates_content(syntax)
        """Whether the template loops over a message's content, so that it is handed lists of parts."""
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(syntax))
        """The names that the template reads from outside."""
        self.accepts_later_system = self._accepts_later_system()
        """Whether a system message may follow others."""
        self.can_stop_thinking = self._can_stop_thinking()
        """Whether the effort "none" is understood: it renders, and unlike every other effort."""

    def _accepts_later_system(self) -> bool:
        """Tried out as the engine does: without its own functions, tags and special tokens, so that a template which
        needs those counts as refusing."""
        turn = [{"role": "system", "content": "t"}, {"role": "user", "content": "t"}]
        missing = {name: _ENVIRONMENT.undefined(name=name) for name in ("raise_exception", "strftime_now")}
        token = _DEADLINE.set(time.monotonic() + _PROBE_SECONDS)
        try:
            self._template.render(messages=turn * 2, add_generation_prompt=False, **missing)
        except Exception:
            return False
        finally:
            _DEADLINE.reset(token)
        return re.search(r"\{%-?\s*generation\b", self.source) is None

    def _can_stop_thinking(self) -> bool:
        none = self._with_effort("none")
        return none is not None and all(self._with_effort(effort) != none for effort in _EFFORTS)

    def _with_effort(self, effort: str) -> str | None:
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        try:
            return self.render(
                [{"role": "user", "content": "Hi"}], variables=variables, max_seconds=_PROBE_SECONDS
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
        token = _DEADLINE.set(time.monotonic() + max_seconds)
        try:
            rendered = self._generate(
                {
                    "documents": None,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                },
                max_characters,
            )
        except TemplateFailed:
            raise
        except Exception as error:
            # Templates run on data of any shape: whatever they raise means that they do not fit it.
            raise TemplateFailed(_reason(error)) from None
        finally:
            _DEADLINE.reset(token)
        return _cut_after_final(rendered, final) if continue_final_message else rendered

    def _generate(self, variables: dict[str, Any], max_characters: int) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > max_characters:
                raise TemplateFailed(f"the template wrote more than {max_characters} characters")
            _check_deadline()
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


# The instant (monotonic clock) at which the rendering on this thread must stop.
_DEADLINE: ContextVar[float] = ContextVar("template_deadline", default=float("inf"))

_MAX_REPEAT = 1 << 20


def _check_deadline() -> None:
    if time.monotonic() > _DEADLINE.get():
        raise TemplateTimeout("the template took too long")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the clock wherever a template can loop, and no huge products."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_deadline()
        return super().getitem(obj, argument)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not _is_small_power(left, right):
            raise jinja2.exceptions.SecurityError("the power is too large")
        if operator == "*" and not _is_small_product(left, right):
            raise jinja2.exceptions.SecurityError("the product is too large")
        if operator == "%" and isinstance(left, str) and any(len(run) > 4 for run in _digit_runs(left)):
            raise jinja2.exceptions.SecurityError("the field is too wide")
        return super().call_binop(context, operator, left, right)


def _is_small_power(left: Any, right: Any) -> bool:
    return (
        isinstance(left, int | float)
        and isinstance(right, int | float)
        and abs(left) < 2**32
        and abs(right) <= 16
    )


def _is_small_product(left: Any, right: Any) -> bool:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple):
            return isinstance(times, int) and len(sequence) * times <= _MAX_REPEAT
    return bool(abs(left) < 2**64 and abs(right) < 2**64)


def _digit_runs(text: str) -> list[str]:
    return "".join(char if char.isdigit() else " " for char in text).split()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote; for a prompt it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    # Local time, as the engine's own function: the two agree where both run in one time zone.
    return datetime.now().strftime(layout)


def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    filters: dict[str, Callable[..., Any]] = environment.filters
    filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


def _reason(error: BaseException) -> str:
    return ascii(f"{type(error).__name__}: {error}"[:300])[1:-1]
