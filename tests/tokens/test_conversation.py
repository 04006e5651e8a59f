"""Messages on their way to a template, and what templates are found to want."""

from __future__ import annotations

from typing import Any

import pytest

from picker.tokens.conversation import UnsupportedContent, conversation, merge_system
from picker.tokens.template import ChatTemplate, TemplateFailed, TemplateTimeout

TEXT = {"type": "text", "text": "a"}


def prepared(*messages: dict[str, Any], as_parts: bool = False, template: str = "") -> list[dict[str, Any]]:
    return conversation(messages, as_parts=as_parts, template_source=template)


@pytest.mark.parametrize(
    ("content", "text", "parts"),
    [
        ("a", "a", [TEXT]),
        (None, "", []),
        ("", "", [{"type": "text", "text": ""}]),
        ([TEXT, TEXT], "a\na", [TEXT, TEXT]),
        (["a", TEXT], "a\na", [TEXT, TEXT]),
        ([TEXT, {**TEXT, "text": ""}], "a", [TEXT, {**TEXT, "text": ""}]),
        ([{"type": "input_text", "text": "a"}], "a", [TEXT]),
        ([{"type": "refusal", "refusal": "a"}], "a", [TEXT]),
        ([{"type": "thinking", "thinking": "a"}], "a", [TEXT]),
        ([{"type": "text", "text": None}, TEXT], "a", [TEXT]),
        (
            [{**TEXT, "cache_control": {"type": "ephemeral"}}],
            "a",
            [{**TEXT, "cache_control": {"type": "ephemeral"}}],
        ),
        ([{"type": "tool_reference", "name": "a"}], "a", [{"type": "tool_reference", "name": "a"}]),
    ],
)
def test_content_as_text_and_as_parts(content: Any, text: str, parts: list[Any]) -> None:
    message = {"role": "user", "content": content}
    assert prepared(message) == [{"role": "user", "content": text}]
    assert prepared(message, as_parts=True) == [{"role": "user", "content": parts}]


def test_tools_answers_are_text_even_among_parts() -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": [TEXT, TEXT], "other": 1}
    assert prepared(message, as_parts=True) == [{"role": "tool", "content": "a\na", "tool_call_id": "c"}]
    reference = {"role": "tool", "content": [{"type": "tool_reference", "name": "f"}]}
    assert isinstance(prepared(reference, as_parts=True)[0]["content"], list)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", {}),
        ("not json", {}),
        ("[" * 10**5, {}),
    ],
)
def test_arguments_of_tool_calls_are_objects(arguments: Any, seen: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = prepared({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"] == [{**call, "function": {"name": "f", "arguments": seen}}]
    assert call["function"] == {"name": "f", "arguments": arguments}, (
        "the request's own message stays as it is"
    )


def test_no_tool_calls_and_an_empty_list_of_them_are_alike() -> None:
    assert prepared({"role": "assistant", "content": "a", "tool_calls": []}) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize("call", [5, {}, {"function": 5}, {"type": "custom", "function": {}}])
def test_calls_of_another_shape_are_refused(call: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        prepared({"role": "assistant", "tool_calls": [call]})


def test_reasoning_goes_by_both_its_names() -> None:
    (message,) = prepared({"role": "assistant", "content": "a", "reasoning": "r", "name": "n"})
    assert message == {
        "role": "assistant",
        "content": "a",
        "reasoning": "r",
        "reasoning_content": "r",
        "name": "n",
    }


def test_developers_become_the_system_where_the_template_knows_none() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "developer", "content": "d"},
        {"role": "system", "content": "s"},
    ]
    assert prepared(*messages) == [{"role": "system", "content": "d\n\ns"}, {"role": "user", "content": "q"}]
    assert [message["role"] for message in prepared(*messages, template="'developer'")] == [
        "user",
        "developer",
        "system",
    ]
    first = [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}]
    assert [message["role"] for message in prepared(*first)] == ["system", "user"]


def test_a_changing_header_is_dropped_from_system_prompts() -> None:
    header = "x-anthropic-billing-header: cch=1"
    assert prepared({"role": "system", "content": f"{header}\nrest"})[0]["content"] == "rest"
    assert (
        prepared({"role": "system", "content": [{"type": "text", "text": header}, TEXT]})[0]["content"] == "a"
    )
    assert prepared({"role": "user", "content": header})[0]["content"] == header


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"image_url": "x"}, {"type": "mystery"}]
)
def test_media_are_not_text(part: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedContent):
        prepared({"role": "user", "content": [TEXT, part]})


def test_system_messages_are_gathered_in_front() -> None:
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "q"}
    assert merge_system([system, user, {**system, "content": "b"}]) == (
        {"role": "system", "content": "ab"},
        user,
    )
    assert merge_system([user]) == (user,)


@pytest.mark.parametrize(
    ("source", "wants_parts"),
    [
        ("{{ messages[0].content }}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}", True),
        (
            "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}",
            True,
        ),
        (
            "{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for p in m.parts %}{% endfor %}{% endfor %}", False),
        (
            "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(c=m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ show(messages) }}",
            False,
        ),
    ],
)
def test_the_shape_of_content_is_read_off_the_template(source: str, wants_parts: bool) -> None:
    assert ChatTemplate(source).wants_parts is wants_parts


@pytest.mark.parametrize(
    ("source", "accepts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('no') }}{% endif %}{% endfor %}",
            False,
        ),
        ("{{ strftime_now('%Y') }}", False),
        ("{{ bos_token + 'x' }}", False),
        ("{% generation %}x{% endgeneration %}", False),
    ],
)
def test_whether_system_messages_may_follow_others(source: str, accepts: bool) -> None:
    assert ChatTemplate(source).accepts_later_system is accepts


@pytest.mark.parametrize(
    ("source", "can"),
    [
        ("{{ '' if enable_thinking else 'no' }}", True),
        ("{{ reasoning_effort }}", True),
        ("always the same", False),
        ("{{ raise_exception('no') if reasoning_effort == 'none' }}", False),
        ("{{ 'max' if reasoning_effort not in ['low'] }}", False),
    ],
)
def test_whether_thinking_can_be_turned_off(source: str, can: bool) -> None:
    assert ChatTemplate(source).can_stop_thinking is can


def test_rendering_is_bounded() -> None:
    user = [{"role": "user", "content": "a"}]
    with pytest.raises(TemplateFailed):
        ChatTemplate("{% for i in range(100) %}{{ 'x' * 100 }}{% endfor %}").render(user, max_characters=1000)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateTimeout):
        ChatTemplate(loop).render(user, max_seconds=0.05)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 2 ** (10 ** 8) }}",
        "{{ [0] * 10 ** 8 }}",
        "{{ '%099999999d' % 1 }}",
        "{{ messages[0].__class__ }}{{ messages[0].update({'x': 1}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.format.__self__.__class__.__subclasses__() }}",
        "{% include 'x' %}",
        "{{ messages[0]['content']() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])


def test_continuing_a_message_cuts_behind_it() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    trimmed = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    messages = [{"role": "assistant", "content": "so far "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert template.render(messages, **options) == "[so far "
    assert trimmed.render(messages, **options) == "[so far"
    with pytest.raises(TemplateFailed):
        ChatTemplate("nothing of it").render(messages, **options)
    with pytest.raises(TemplateFailed):
        template.render(messages, continue_final_message=True)
