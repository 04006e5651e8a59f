"""Which shape of message content a chat template expects.

A template that loops over the content of a message gets a list of parts, any other one string. The engine decides
this from the template's syntax tree; the same rule is followed here, its blind spots included.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def iterates_content(template: nodes.Template) -> bool:
    """Whether the template has a loop over a message's content: directly, by a macro's parameter, or over a
    variable called `content`."""
    messages = _loop_variables_over_messages(template)
    parameters, in_macros = _macro_loops(template, messages)
    for loop in template.find_all(nodes.For):
        if any(_is_access(loop.iter, name, "content") for name in messages):
            return True
        if isinstance(loop.iter, nodes.Name):
            if loop.iter.name in parameters.get(id(loop), ()):
                return True
            if id(loop) not in in_macros and loop.iter.name == "content":
                return True
    return False


def _loop_variables_over_messages(template: nodes.Template) -> list[str]:
    sources = list(_aliases(template, "messages"))
    return [
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_is_access(loop.iter, source) for source in sources)
    ]


def _aliases(template: nodes.Template, name: str) -> Iterator[str]:
    """The variable and every one that it, or a part of it, is assigned to."""
    seen = {name}
    waiting = [name]
    while waiting:
        current = waiting.pop(0)
        yield current
        for assignment in template.find_all(nodes.Assign):
            target = assignment.target
            if (
                isinstance(target, nodes.Name)
                and target.name not in seen
                and _is_access(assignment.node, current)
            ):
                seen.add(target.name)
                waiting.append(target.name)


def _macro_loops(template: nodes.Template, messages: list[str]) -> tuple[dict[int, set[str]], set[int]]:
    """Per loop inside a macro (by id): the parameters that some call binds to a message's content."""
    parameters: dict[int, set[str]] = {}
    in_macros: set[int] = set()
    calls = [call for call in template.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in template.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        bound: set[str] = set()
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given = [
                    *zip(names, call.args, strict=False),
                    *((word.key, word.value) for word in call.kwargs),
                ]
                bound.update(
                    name
                    for name, value in given
                    if name in names and any(_is_access(value, message, "content") for message in messages)
                )
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if bound:
                parameters[id(loop)] = bound
    return parameters, in_macros


def _is_access(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression reads the variable (or its item `key`), perhaps sliced, filtered or tested."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_access(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_access(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return (
            _is_access_to_name(node.node, name)
            and isinstance(node.arg, nodes.Const)
            and node.arg.value == key
        )
    return isinstance(node, nodes.Getattr) and _is_access_to_name(node.node, name) and node.attr == key


def _is_access_to_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
