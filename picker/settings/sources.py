"""Settings from the file, the environment and the command line, and errors that blame the right one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize, ValidationError
from pydantic.fields import FieldInfo

from picker.policy.document import Document, plain_scalar, read_document
from picker.policy.errors import PolicyError
from picker.requests.hints import Trust
from picker.settings.model import Settings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

ENV_PREFIX = "PICKER_"


class SettingsError(ValueError):
    """Settings that cannot be used. One problem a line, each with the place that it came from."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that is not a group: where it lives and what it is."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def key(self) -> str:
        """Its name in the file."""
        return ".".join(self.path)

    @property
    def env(self) -> str:
        return ENV_PREFIX + "__".join(self.path).upper()

    @property
    def flag(self) -> str:
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def kind(self) -> str:
        """What its value looks like."""
        return " | ".join(_kinds(self.field.annotation))

    @property
    def default(self) -> str:
        """Its default as one would write it; empty for none."""
        value = self.field.default
        if isinstance(value, ByteSize):
            return value.human_readable().replace(".0", "")
        if isinstance(value, bool):
            return str(value).lower()
        return "" if value in (None, {}, ()) else f"{value}"

    @property
    def description(self) -> str:
        if self.field.annotation is Trust:
            return f"Who may give the hint `{self.path[-1]}`: anyone, only the gateway's metadata, or nobody."
        return (self.field.description or "").rstrip(".").replace("\n", " ") + "."

    @property
    def is_flag(self) -> bool:
        return self.field.annotation is bool

    def read(self, text: str) -> Any:
        """The value that a variable or a flag has as its text; the model judges it later."""
        if not text and NoneType in get_args(self.field.annotation):
            return None
        if get_origin(self.field.annotation) is dict:
            return _read_map(text)
        if get_origin(self.field.annotation) is tuple:
            return tuple(name for part in text.split(",") if (name := part.strip()))
        return text if self.kind in ("text", "path") else plain_scalar(text)


def all_settings(section: type[BaseModel] = Settings, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Every setting, in the order of the groups."""
    for name, field in section.model_fields.items():
        here = (*path, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from all_settings(field.annotation, here)
        else:
            yield Setting(here, field)


def load_settings(
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Settings:
    """Read the file, the environment and the flags (by `Setting.key`), the later ones over the earlier.

    Raises SettingsError that names every problem with its place.
    """
    document = _read_file(config) if config is not None else Document("settings", {})
    sources = _Sources(document, environ or {}, flags or {})
    try:
        return Settings.model_validate(sources.merged())
    except ValidationError as error:
        raise SettingsError("\n".join(sources.explain(problem) for problem in error.errors())) from None


def _read_file(path: Path) -> Document:
    try:
        document = read_document(path.read_text(encoding="utf-8"), str(path))
    except PolicyError as error:
        raise SettingsError(str(error)) from None
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SettingsError(f"{path}: cannot be read: {reason}") from None
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        raise SettingsError(
            f"{path}: settings must be a mapping of groups: {', '.join(Settings.model_fields)}"
        )
    for setting in all_settings():
        if setting.kind in ("path", "name=path,..."):
            _resolve(document.data, setting.path, path.parent)
    return document


def _resolve(data: Any, path: tuple[str, ...], directory: Path) -> None:
    """Paths in the file are meant from where the file is."""
    *parents, name = path
    for parent in parents:
        data = data.get(parent) if isinstance(data, dict) else None
    match data.get(name) if isinstance(data, dict) else None:
        case str(text):
            data[name] = str(directory / text)
        case dict(named):
            data[name] = {
                key: str(directory / text) if isinstance(text, str) else text for key, text in named.items()
            }


class _Sources:
    """The three places that settings come from, and which of them said what."""

    def __init__(self, document: Document, environ: Mapping[str, str], flags: Mapping[str, str]) -> None:
        self._document = document
        self._origin: dict[tuple[str, ...], str] = {}
        self._values: dict[tuple[str, ...], Any] = {}
        known = {setting.env: setting for setting in all_settings()}
        for name, text in environ.items():
            if setting := known.get(name):
                self._take(setting, setting.read(text), name)
            elif name.startswith(ENV_PREFIX) and "__" in name:
                raise SettingsError(f"{name}: no such setting{_nearest(name, known)}")
        by_key = {setting.key: setting for setting in all_settings()}
        for key, text in flags.items():
            self._take(by_key[key], by_key[key].read(text), by_key[key].flag)

    def _take(self, setting: Setting, value: Any, origin: str) -> None:
        self._values[setting.path] = value
        self._origin[setting.path] = origin

    def merged(self) -> dict[str, Any]:
        data: dict[str, Any] = _copy(self._document.data)
        for (*parents, name), value in self._values.items():
            group = data
            for parent in parents:
                inner = group.get(parent)
                group[parent] = inner if isinstance(inner, dict) else {}
                group = group[parent]
            group[name] = value
        return data

    def explain(self, problem: ErrorDetails) -> str:
        path = tuple(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            text = f"no such setting{_nearest(path[-1], _keys_beside(path))}"
        else:
            text = problem["msg"].removeprefix("Value error, ")
        for length in range(len(path), 0, -1):
            if origin := self._origin.get(path[:length]):
                return f"{origin}: {text}"
        return str(self._document.error(path, text)) if path else text


def _copy(data: Any) -> Any:
    # Aliases in the file share one object; a flag for the one must not reach the other.
    return {key: _copy(value) for key, value in data.items()} if isinstance(data, dict) else data


def _keys_beside(path: tuple[str, ...]) -> Iterable[str]:
    section: type[BaseModel] = Settings
    for name in path[:-1]:
        section = section.model_fields[name].annotation  # type: ignore[assignment]
    return section.model_fields


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(names)}" if len(names) < 20 else ""


def _read_map(text: str) -> Any:
    """`a=x,b=y`, or a JSON object where a part has a comma."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(equals for _, equals, _ in pairs):
        return text
    return {name.strip(): value.strip() for name, _, value in pairs}


def _kinds(annotation: Any) -> list[str]:
    origin = get_origin(annotation)
    if origin is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) if part is not NoneType for kind in _kinds(part)]
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin is dict:
        return ["name=path,..." if get_args(annotation)[1] is Path else "JSON object"]
    if origin is tuple:
        return [f"{kind},..." for kind in _kinds(get_args(annotation)[0])]
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return list(annotation)
    return [_NAMES[annotation]]


_NAMES: Mapping[Any, str] = {
    str: "text",
    int: "number",
    float: "number",
    bool: "true | false",
    Path: "path",
    ByteSize: "bytes",
}
