"""Chat completions: messages, tools and what the request adds for the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct

from picker.requests.errors import BadRequest, OverLimit, excerpt
from picker.requests.limits import BodyLimits
from picker.requests.prompts import ChatPrompt, Truncation


class ChatBody(Struct):
    """The fields of a chat completions body that decide its prompt and its routing."""

    model: Any = None
    messages: Any = UNSET
    tools: Any = None
    stream: Any = False
    max_tokens: Any = None
    max_completion_tokens: Any = None
    cache_salt: Any = None
    priority: Any = None
    add_generation_prompt: Any = UNSET
    continue_final_message: Any = False
    add_special_tokens: Any = False
    documents: Any = None
    reasoning_effort: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None


def chat_prompt(body: ChatBody, limits: BodyLimits) -> ChatPrompt:
    """The prompt of a chat completions body. Raises BadRequest."""
    if body.continue_final_message and body.add_generation_prompt not in (UNSET, False, None):
        raise BadRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=tuple(map(_with_reasoning, messages_of(body.messages, "messages", limits))),
        tools=tools_of(body.tools, limits),
        add_generation_prompt=True
        if body.add_generation_prompt is UNSET
        else bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=template_kwargs(
            body.chat_template_kwargs, reasoning_effort=body.reasoning_effort, documents=body.documents
        ),
        own_template=body.chat_template is not None,
        truncation=truncation_of(body.truncate_prompt_tokens, body.truncation_side),
    )


def messages_of(value: Any, param: str, limits: BodyLimits) -> tuple[Mapping[str, Any], ...]:
    """A non-empty list of objects with a role. Raises BadRequest."""
    if not isinstance(value, list):
        raise BadRequest(f"{param} must be a list of messages", param=param)
    if not value:
        raise BadRequest(f"{param} must not be empty", param=param)
    if len(value) > limits.max_messages:
        raise OverLimit(
            f"{param} holds more than {limits.max_messages} messages", "max_messages", param=param
        )
    for index, message in enumerate(value):
        where = f"{param}[{index}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{where} must be an object", param=where)
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"{where} must have a role", param=f"{where}.role")
        _check_content(message.get("content"), f"{where}.content")
    return tuple(value)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reasoning under its old name counts where there is none under the new one."""
    old = message.get("reasoning_content")
    return message if old is None or message.get("reasoning") is not None else {**message, "reasoning": old}


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list) or not all(isinstance(part, str | dict) for part in content):
        raise BadRequest(f"{where} must be a string or a list of content parts", param=where)


def tools_of(value: Any, limits: BodyLimits) -> tuple[Mapping[str, Any], ...] | None:
    """Tools as the engine hands them to its template: known fields, in its order, absent ones as null."""
    if value is None:
        return None
    checked = tool_list(value, limits)
    tools = []
    for index, tool in enumerate(checked):
        function = tool.get("function")
        if not isinstance(function, dict):
            raise BadRequest(f"tools[{index}].function must be an object", param=f"tools[{index}].function")
        tools.append(function_tool(function, f"tools[{index}].function", tool.get("defer_loading")))
    return tuple(tools)


def tool_list(value: Any, limits: BodyLimits) -> Sequence[Mapping[str, Any]]:
    """A list of objects within the limit. Raises BadRequest."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRequest("tools must be a list of objects", param="tools")
    if len(value) > limits.max_tools:
        raise OverLimit(f"tools holds more than {limits.max_tools} tools", "max_tools", param="tools")
    return value


def function_tool(function: Mapping[str, Any], where: str, defer_loading: Any = None) -> dict[str, Any]:
    """One function tool as vLLM's template sees it (its request model dumps declared fields only)."""
    if not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.name must be a string", param=f"{where}.name")
    shown = {key: function.get(key) for key in ("name", "description", "parameters")}
    strict = function.get("strict")
    deferred = function.get("defer_loading", defer_loading)
    if strict is not None:
        shown["strict"] = strict
    if deferred is not None:
        shown["defer_loading"] = deferred
    tool: dict[str, Any] = {"type": "function", "function": shown}
    if defer_loading is not None:
        tool["defer_loading"] = defer_loading
    return tool


def template_kwargs(
    own: Any, *, reasoning_effort: Any = None, documents: Any = None, param: str = "chat_template_kwargs"
) -> dict[str, Any]:
    """What a request adds for the template: its own kwargs, overridden by the fields that stand beside them.

    An effort other than "none" also asks for thinking, unless the request says so itself (vLLM 0.32).
    """
    if own is not None and not isinstance(own, dict):
        raise BadRequest(f"{param} must be an object, not {excerpt(own)}", param=param)
    merged: dict[str, Any] = dict(own or {})
    if reasoning_effort is not None:
        merged.setdefault("enable_thinking", reasoning_effort != "none")
        merged["reasoning_effort"] = reasoning_effort
    if documents is not None:
        merged["documents"] = documents
    return merged


def truncation_of(value: Any, side: Any) -> Truncation | None:
    """`truncate_prompt_tokens`: the engine keeps that many ids, by default the last. -1 needs its own limits."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return None
    return Truncation(value, right=side == "right", keeps_frame=side is None)
