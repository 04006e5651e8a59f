"""The Messages API (Anthropic's shape), turned into chat messages as vLLM turns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import UNSET, Struct

from picker.requests.chat import function_tool, messages_of, template_kwargs, tool_list
from picker.requests.errors import BadRequest
from picker.requests.limits import BodyLimits
from picker.requests.prompts import ChatPrompt

# A system block that changes on every request of one well-known client; the engine drops it.
_BILLING_HEADER = "x-anthropic-billing-header"


class MessagesBody(Struct):
    """The fields of a Messages body that decide its prompt and its routing."""

    model: Any = None
    messages: Any = UNSET
    system: Any = None
    tools: Any = None
    thinking: Any = None
    output_config: Any = None
    stream: Any = False
    max_tokens: Any = None
    cache_salt: Any = None
    priority: Any = None
    chat_template_kwargs: Any = None


def messages_prompt(body: MessagesBody, limits: BodyLimits) -> ChatPrompt:
    """The prompt of a Messages body. Raises BadRequest."""
    given = messages_of(body.messages, "messages", limits)
    converted: list[dict[str, Any]] = []
    if system := _system_text(body.system):
        converted.append({"role": "system", "content": system})
    for message in given:
        _add_message(converted, message)
    return ChatPrompt(
        messages=tuple(converted),
        tools=_tools(body.tools, given, limits),
        template_kwargs=template_kwargs(body.chat_template_kwargs, reasoning_effort=_effort(body)),
        messages_api=True,
    )


def _system_text(content: Any) -> str:
    """The text of a system prompt or message: text blocks end to end, without the billing block."""
    if isinstance(content, str):
        return content
    texts = (block.get("text") for block in _blocks(content) if block.get("type") == "text")
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(_BILLING_HEADER))


def _blocks(content: Any) -> Iterable[Mapping[str, Any]]:
    return (block for block in content if isinstance(block, dict)) if isinstance(content, list) else ()


def _add_message(converted: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Append what one message becomes: tool results stand before it, as messages of their own."""
    role, content = message["role"], message.get("content")
    if role == "system":
        text = _system_text(content)
        if text and not (isinstance(content, str) and text.startswith(_BILLING_HEADER)):
            converted.append({"role": "system", "content": text})
        return
    if isinstance(content, str):
        converted.append({"role": role, "content": content})
        return
    parts: list[dict[str, Any]] = []
    tool_calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in _blocks(content):
        _add_block(block, role, parts, tool_calls, thoughts, converted)
    turned: dict[str, Any] = {"role": role}
    if thoughts:
        turned["reasoning"] = "".join(thoughts)
    if tool_calls:
        turned["tool_calls"] = tool_calls
    if parts:
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        turned["content"] = parts[0]["text"] if alone else parts
    if role != "user" or "content" in turned:
        converted.append(turned)


def _add_block(
    block: Mapping[str, Any],
    role: str,
    parts: list[dict[str, Any]],
    tool_calls: list[dict[str, Any]],
    thoughts: list[str],
    converted: list[dict[str, Any]],
) -> None:
    match block.get("type"):
        case "text" if block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
        case "image" if block.get("source"):
            parts.append({"type": "image_url", "image_url": {"url": ""}})
        case "thinking" if isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        case "tool_use":
            function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
            tool_calls.append({"id": block.get("id") or "", "type": "function", "function": function})
        case "tool_result" if role == "user":
            converted.extend(_tool_result(block))
        case "tool_result":
            text = str(block["content"]) if block.get("content") else ""
            parts.append({"type": "text", "text": f"Tool result: {text}"})


def _tool_result(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A tool's answer as a tool message; its images follow as a user's message, its references as another tool's."""
    content = block.get("content")
    call_id = block.get("tool_use_id") or ""
    items = list(_blocks(content))
    texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join(item for item in texts if isinstance(item, str))
    messages: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": call_id, "content": text}]
    if images := [item for item in items if item.get("type") == "image"]:
        parts = [{"type": "image_url", "image_url": {"url": ""}} for _ in images]
        messages.append({"role": "user", "content": parts})
    names = [
        item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"
    ]
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        messages.append({"role": "tool", "tool_call_id": call_id, "content": references})
    return messages


def _tools(
    value: Any, messages: Iterable[Mapping[str, Any]], limits: BodyLimits
) -> tuple[Mapping[str, Any], ...] | None:
    """The tools in effect at the end of the conversation: blocks in system messages may add and remove some."""
    declared = tool_list(value, limits) if value is not None else ()
    tools: dict[Any, Mapping[str, Any]] = {_tool_name(tool, "tools"): tool for tool in declared}
    removed: set[Any] = set()
    changed = False
    for message in messages:
        for block in _blocks(message.get("content")):
            kind, change = block.get("type"), block.get("tool")
            if kind not in ("tool_addition", "tool_removal") or not isinstance(change, dict):
                continue
            changed = True
            definition = change.get("definition")
            if isinstance(definition, dict):
                tools[name := _tool_name(definition, "messages")] = definition
            elif (name := _tool_name(change, "messages")) in tools and kind == "tool_addition":
                tools[name] = {**tools[name], "defer_loading": None}
            (removed.add if kind == "tool_removal" else removed.discard)(name)
    if value is None and not changed:
        return None
    return tuple(_shown(tool) for name, tool in tools.items() if name not in removed)


def _tool_name(tool: Mapping[str, Any], param: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise BadRequest("a tool must have a name", param=param)
    return name


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest("a tool must have an input_schema object", param="tools")
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return function_tool({**tool, "parameters": parameters}, "tools")


def _effort(body: MessagesBody) -> Any:
    """How much thinking the request asks of the template."""
    if isinstance(body.thinking, dict) and body.thinking.get("type") == "disabled":
        return "none"
    return body.output_config.get("effort") if isinstance(body.output_config, dict) else None
