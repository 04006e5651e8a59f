"""Messages as the engine prepares them for its chat template.

The rules are vLLM's (0.32): text parts joined by line ends or kept as a list, tool arguments as objects, developer
messages turned into system messages where the template knows none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from picker.tokens.count import is_media


class UnsupportedContent(Exception):
    """The conversation holds something else than text."""


# A line that one client adds to system prompts, different each time; the engine drops it.
_BILLING_HEADER = "x-anthropic-billing-header"

# Fields of content parts that have a meaning of their own; any other is handed to the template.
_PART_FIELDS = frozenset(
    {
        "type",
        "text",
        "refusal",
        "thinking",
        "closed",
        "name",
        "uuid",
        "tool_reference",
        "data",
        "detail",
        "file",
        "prompt_cache_breakpoint",
    }
)


def conversation(
    messages: Sequence[Mapping[str, Any]], *, as_parts: bool, template_source: str
) -> list[dict[str, Any]]:
    """The messages for a template that wants content as lists of parts or as strings.

    Raises UnsupportedContent for media, TypeError or ValueError for shapes that the engine refuses.
    """
    prepared = [_message(message, as_parts) for message in messages]
    if any(message["role"] == "developer" for message in prepared) and not _knows_developer(template_source):
        prepared = _developer_to_system(prepared)
    return prepared


def merge_system(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """All system messages as one in front, end to end: what the engine does for the Messages API (whose system
    messages are strings by now) where its template wants the system message first."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return ({"role": "system", "content": "".join(texts)}, *others) if texts else tuple(others)


def _message(message: Mapping[str, Any], as_parts: bool) -> dict[str, Any]:
    role = message["role"]
    parts = _content_parts(message.get("content"))
    if role == "system":
        parts = _without_billing_header(parts)
    if any(map(is_media, parts)):
        raise UnsupportedContent(role)
    prepared: dict[str, Any] = {"role": role}
    if as_parts:
        content = [part for part in map(_part, parts) if part is not None]
        prepared["content"] = _tool_content(content) if role == "tool" else content
    else:
        texts = [_text(part) for part in parts]
        prepared["content"] = "\n".join(text for text in texts if text)
    if role == "assistant":
        _add_assistant_fields(prepared, message)
    elif role == "tool" and "tool_call_id" in message:
        prepared["tool_call_id"] = message["tool_call_id"]
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            prepared[key] = message[key]
    if role == "developer" and message.get("tools") is not None:
        prepared["tools"] = message["tools"]
    return prepared


def _content_parts(content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content)


def _text(part: Any) -> str | None:
    """The text of a text part; None where it is there but empty of text."""
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind == "tool_reference":
        value = part.get("name")
    elif kind in ("refusal", "thinking"):
        value = part.get(kind)
    else:
        value = part.get("text")
    if value is not None and not isinstance(value, str):
        raise TypeError("a content part's text must be a string")
    return value


def _part(part: Any) -> dict[str, Any] | None:
    text = _text(part)
    if text is None:
        return None
    if isinstance(part, str):
        return {"type": "text", "text": text}
    if part.get("type") == "tool_reference":
        return {"type": "tool_reference", "name": text}
    return {"type": "text", "text": text} | {
        key: value for key, value in part.items() if key not in _PART_FIELDS
    }


def _tool_content(content: list[dict[str, Any]]) -> Any:
    """A tool's answer is one string even for templates that take parts, unless it holds more than text."""
    if any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def _without_billing_header(parts: list[Any]) -> list[Any]:
    kept = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part if isinstance(part, str) else part.get("text") if is_text else None
        if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _add_assistant_fields(prepared: dict[str, Any], message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls:
        prepared["tool_calls"] = [_tool_call(call) for call in calls]
    if message.get("reasoning") is not None:
        prepared["reasoning"] = prepared["reasoning_content"] = message["reasoning"]


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates expect them; what is no object becomes an empty one."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise TypeError("a tool call must be an object with a function")
    if call.get("type", "function") != "function":
        raise ValueError("only function calls are supported")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    function = {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}
    return {**call, "function": function}


def _knows_developer(template_source: str) -> bool:
    return '"developer"' in template_source or "'developer'" in template_source


def _developer_to_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages become system messages; if that leaves one that is not first, all become one in front."""
    turned = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    if not any(message["role"] == "system" for message in turned[1:]):
        return turned
    texts = [_joined_text(message["content"]) for message in turned if message["role"] == "system"]
    others = [message for message in turned if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]


def _joined_text(content: Any) -> str:
    return (
        content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
    )
