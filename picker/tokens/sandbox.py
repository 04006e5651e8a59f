"""Where chat templates run: jinja's sandbox, bounded in time, in what is written, and in what a single step makes.

Templates come with the model and are the operator's; what they are given is the client's. No client's data makes a
template of good will pass these bounds by much. One of ill will can still fill memory step by step until its time is
over: only a process of its own could stop that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from math import inf
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor


class TemplateFailed(Exception):
    """The template refused the conversation, is broken, or passed its bounds. The message is safe to log."""


class TemplateOverLimit(TemplateFailed):
    """The template passed a bound: of what it may write, or of what a single step of it may make."""


class TemplateTimeout(TemplateOverLimit):
    """The template ran longer than it may."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    deadline: float = inf  # monotonic clock
    characters: int = 64 << 20


_NONE_SET = _Bounds()
# Those of the rendering on this thread.
_BOUNDS: ContextVar[_Bounds] = ContextVar("template_bounds", default=_NONE_SET)


@contextmanager
def bounded(seconds: float, characters: int = 64 << 20) -> Iterator[None]:
    """Templates that are rendered inside stop after so many seconds, or at more characters."""
    token = _BOUNDS.set(_Bounds(time.monotonic() + seconds, characters))
    try:
        yield
    finally:
        _BOUNDS.reset(token)


def check_deadline() -> None:
    if time.monotonic() > _BOUNDS.get().deadline:
        raise TemplateTimeout("the template took too long")


def check_size(characters: int) -> None:
    limit = _BOUNDS.get().characters
    if characters > limit:
        raise TemplateOverLimit(f"the template made a text of more than {limit} characters")


def environment() -> jinja2.Environment:
    """What templates are compiled in. Each one goes through `with_bounded_steps` first."""
    made = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters |= {
        "tojson": _tojson,
        "join": _join,
        _CONCATENATE: _concatenate,
        _ADD: _add,
        _CHECK: _check,
        **{name: _sized(made.filters[name], size) for name, size in _FILTER_SIZES.items()},
    }
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    del made.globals["lipsum"]
    return made


def with_bounded_steps(template: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """The same template, in which `+`, `~` and `set` blocks are bounded too, wherever their result is kept."""
    changed: jinja2.nodes.Template = _BoundedSteps().visit(template)
    return changed


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the clock wherever a template can loop, and no step that makes much of little."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_deadline()
        size = _METHOD_SIZES.get(getattr(obj, "__name__", ""))
        # jinja puts a wrapper around `format`.
        method = getattr(obj, "__wrapped__", obj)
        if size is not None and isinstance(text := getattr(method, "__self__", None), str | bytes):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            check_size(size(text, *args, **kwargs))
        # A macro's result, for one.
        return _check(super().call(context, obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        check_deadline()
        return super().getitem(obj, argument)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "**" if not _is_small_power(left, right):
                raise jinja2.exceptions.SecurityError("the power is too large")
            case "*" if not _is_small_product(left, right):
                raise jinja2.exceptions.SecurityError("the product is too large")
            case "%" if isinstance(left, str | bytes):
                check_size(_formatted(left, right))
        return super().call_binop(context, operator, left, right)


_MAX_REPEAT = 1 << 20


def _is_small_power(left: Any, right: Any) -> bool:
    return (
        isinstance(left, int | float)
        and isinstance(right, int | float)
        and abs(left) < 2**32
        and abs(right) <= 16
    )


def _is_small_product(left: Any, right: Any) -> bool:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple):
            return isinstance(times, int) and len(sequence) * times <= _MAX_REPEAT
    return bool(abs(left) < 2**64 and abs(right) < 2**64)


# How large a step's result can be, in characters, from its arguments.

_WIDE_FIELD = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{")


def _formatted(layout: str | bytes, *args: Any, **kwargs: Any) -> int:
    """Of `%` and of `format`. A field is as wide as its text; those that say a width of their own say a small one."""
    text = layout if isinstance(layout, str) else layout.decode("latin-1")
    if _WIDE_FIELD.search(text):
        raise jinja2.exceptions.SecurityError("the field is too wide")
    fields = text.count("%") + text.count("{")
    return len(text) + fields * (10_000 + max((_length(arg) for arg in (*args, *kwargs.values())), default=0))


def _length(value: Any) -> int:
    """The longest text in it, one level down."""
    if isinstance(value, str | bytes):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(len(part) for part in inner if isinstance(part, str | bytes))


def _padded(text: Any, width: int = 80, *_: Any, **__: Any) -> int:
    return len(str(text)) + int(width)


def _replaced(text: Any, old: Any, new: Any, count: int | None = -1) -> int:
    times = str(text).count(str(old)) if count is None or count < 0 else int(count)
    return len(str(text)) + times * len(str(new))


def _joined(glue: Any, parts: Any) -> int:
    parts = list(parts)
    return len(glue) * len(parts) + sum(len(part) for part in parts if isinstance(part, str | bytes))


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise jinja2.exceptions.SecurityError("not for templates")


def _indented(text: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    return len(str(text)) + (str(text).count("\n") + 1) * (len(width) if isinstance(width, str) else width)


def _wrapped(_: Any, text: Any, *args: Any, wrapstring: str | None = None, **__: Any) -> int:
    glue = wrapstring or next((arg for arg in args if isinstance(arg, str)), "\n")
    return len(str(text)) * (1 + len(glue))


def _counted(_: Any, count: int, *__: Any, **___: Any) -> int:
    return int(count)


_Size = Callable[..., int]

_METHOD_SIZES: dict[str, _Size] = {
    **dict.fromkeys(("ljust", "rjust", "center", "zfill"), _padded),
    **dict.fromkeys(("format", "format_map"), _formatted),
    **dict.fromkeys(("expandtabs", "translate"), _refused),
    "replace": _replaced,
    "join": _joined,
}
_FILTER_SIZES: dict[str, _Size] = {
    "center": _padded,
    "indent": _indented,
    "format": _formatted,
    "replace": lambda _, *args, **kwargs: _replaced(*args, **kwargs),
    "wordwrap": _wrapped,
    "batch": _counted,
    "slice": lambda _, *args, **kwargs: _counted(*args, **kwargs),
}


def _sized(function: Callable[..., Any], size: _Size) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_size(size(*args, **kwargs))
        return function(*args, **kwargs)

    return checked


@wraps(jinja2.filters.do_join)
def _join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
    parts = list(value)
    check_size(_joined(str(d), parts))
    return jinja2.filters.do_join(context, parts, d, attribute)


_CONCATENATE = "concatenate"


_ADD = "add"
_CHECK = "check"


def _concatenate(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    check_size(sum(map(len, texts)))
    return "".join(texts)


def _add(parts: list[Any]) -> Any:
    left, right = parts
    if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
        check_size(len(left) + len(right))
    return left + right


def _check(value: Any) -> Any:
    if isinstance(value, str):
        check_size(len(value))
    return value


_SEQUENCES = (str, bytes, list, tuple)


class _BoundedSteps(jinja2.visitor.NodeTransformer):
    """`a + b` becomes `[a, b] | add`, and so on: jinja has no other place to look at it that costs as little.

    What is written at once, `{{ a + b }}`, stays as it is: it is no longer than what it is made of, and counted.
    """

    def visit_Output(self, node: jinja2.nodes.Output) -> jinja2.nodes.Output:
        node.nodes = [self._written(child) for child in node.nodes]
        return node

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Filter:
        self.generic_visit(node)
        return _filtered(_ADD, jinja2.nodes.List([node.left, node.right]), node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:
        self.generic_visit(node)
        return _filtered(_CONCATENATE, jinja2.nodes.List(node.nodes), node)

    def visit_AssignBlock(self, node: jinja2.nodes.AssignBlock) -> jinja2.nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = _filtered(_CHECK, node.filter, node)
        return node

    def _written(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
        match node:
            case jinja2.nodes.Add():
                node.left, node.right = self._written(node.left), self._written(node.right)
            case jinja2.nodes.Concat():
                node.nodes = [self._written(child) for child in node.nodes]
            case _:
                visited: jinja2.nodes.Expr = self.visit(node)
                return visited
        return node


def _filtered(name: str, inner: jinja2.nodes.Expr | None, node: jinja2.nodes.Node) -> jinja2.nodes.Filter:
    """`inner | name` in the place of `node`; inside of a block there is no expression to filter."""
    made = jinja2.nodes.Filter(inner, name, [], [], None, None)
    made.set_lineno(node.lineno)
    if node.environment is not None:
        made.set_environment(node.environment)
    return made


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
    """Written piece by piece where it is indented: depth makes much of little there."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    pieces = []
    size = 0
    for piece in encoder.iterencode(value):
        size += len(piece)
        check_size(size)
        check_deadline()
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    # Local time, as the engine's own function: the two agree where both run in one time zone.
    return datetime.now().strftime(layout)
