"""Messages on their way to a template, and what templates are found to want."""

from __future__ import annotations

import tracemalloc
from typing import Any

import jinja2
import pytest

from picker.tokens.conversation import UnsupportedContent, conversation, merge_system
from picker.tokens.sandbox import TemplateFailed, TemplateOverLimit, TemplateTimeout
from picker.tokens.template import ChatTemplate

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


BOMBS = (
    "{{ 'x'.ljust(10 ** 9) }}",
    "{{ 'x'.encode().center(10 ** 9) }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ 'a\\nb'|indent(10 ** 9) }}",
    "{{ 'x'|batch(10 ** 9, 'y')|list }}",
    "{{ 'x'|slice(10 ** 9)|list }}",
    "{{ messages[0].content.replace('a', messages[0].content)|replace('a', messages[0].content) }}",
    "{{ messages[0].content.join(messages[0].content) | replace('a', messages[0].content) }}",
    "{{ range(3000)|join(messages[0].content) }}",
    "{{ (('%s' * 1000) % ((messages[0].content,) * 1000)) * 1000 }}",
    "{% set n = namespace(x=messages[0].content) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=messages[0].content) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ range(99999)|list|tojson(indent=100000) }}",
    "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x=messages[0].content) %}"
    "{% for i in range(40) %}{% set n.x = twice(n.x) %}{% endfor %}",
    "{% set n = namespace(x=messages[0].content) %}"
    "{% for i in range(40) %}{% set x %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = x %}{% endfor %}",
    "{% macro grow(x) %}{{ grow(x + x) }}{% endmacro %}{{ grow(messages[0].content) }}",
)


@pytest.mark.parametrize("source", BOMBS)
def test_no_step_makes_much_of_little(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateOverLimit):
            ChatTemplate(source).render([{"role": "user", "content": "a" * 1000}], max_characters=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%0999999999d'|format(1) }}",
        "{{ 'x'.expandtabs(10 ** 9) }}",
    ],
)
def test_no_field_is_very_wide(source: str) -> None:
    with pytest.raises(TemplateFailed, match="SecurityError"):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])


def test_deep_arguments_do_not_swell_where_a_template_indents_them() -> None:
    """A template of good will, and a client's tool of 400 kB that would be 100 MB with its indentation."""
    parameters: Any = [1] * 200_000
    for _ in range(120):
        parameters = [parameters]
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    template = ChatTemplate("{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}")
    with pytest.raises(TemplateOverLimit):
        template.render([], tools=tools, max_characters=16 << 20)


def test_bounded_steps_give_what_plain_ones_give() -> None:
    source = (
        "{{ 'a' ~ 1 ~ none ~ messages[0].content }}|{{ '%s-%03d' % ('a', 3) }}|{{ '{} {b}'.format(1, b=2) }}|"
        "{{ messages | map(attribute='role') | join(', ') }}|{{ ', '.join(messages | map(attribute='role')) }}|"
        "{{ 'aXb' | replace('X', '--') }}|{{ 'aXb'.replace('X', '') }}|{{ 'a\nb' | indent(2) }}|"
        "{{ 'x'.ljust(3) }}|{{ [1, 2, 3] | batch(2) | list }}|{{ [1] + [2] }}|{{ 1 + 2 }}|"
        "{% set a = 'x' + 'y' ~ 1 %}{{ a + (a + 'z') | upper }}|{% set b %}in {{ a }}{% endset %}{{ b }}|"
        "{% set c | upper %}in {{ a }}{% endset %}{{ c }}|{{ 'a' if ('a' + 'b') == 'ab' else 'c' + 'd' }}|"
        "{{ {'a': ['é']} | tojson }}|{{ {'a': [1]} | tojson(indent=1) }}"
    )
    plain = jinja2.Environment().from_string(
        source.replace("| tojson ", "| string ").replace("| tojson(indent=1)", "| string")
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "x"}]
    expected = plain.render(messages=messages).split("|")
    got = ChatTemplate(source).render(messages).split("|")
    assert got[:-2] == expected[:-2]
    assert got[-2:] == ['{"a": ["é"]}', '{\n "a": [\n  1\n ]\n}']


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
