"""A model directory for the engine: random weights, the recorded tokenizer, and a chat template that uses everything.

The engine makes the weights up from the configuration, so nothing is downloaded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.32" / "tokenizer"

# Content as one string; reads every variable that requests can set.
FULL = """{{- bos_token }}
{%- if tools %}<|turn|>tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|end|>
{% endif -%}
{%- for message in messages -%}
<|turn|>{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}

{%- if message.reasoning_content %}
<think>{{ message.reasoning_content }}</think>
{%- endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
call {{ call.id }}: {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}
{%- if message.tool_call_id %} (answers {{ message.tool_call_id }}){% endif %}<|end|>
{% endfor -%}
{%- if documents %}{{ documents | tojson(indent=1) }}
{% endif -%}
{%- if add_generation_prompt %}<|turn|>assistant
{% if enable_thinking is defined and not enable_thinking %}no thinking
{% endif %}{% if reasoning_effort is defined %}effort {{ reasoning_effort }}
{% endif %}{% endif %}"""

# Content as a list of parts, trimmed; the system message only in front.
PARTS = """{{- bos_token }}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('the system message comes first') }}{% endif -%}
<|turn|>{{ message.role | upper }}
{%- if message.content is string %} {{ message.content | trim }}
{%- else %}{% for part in message.content %} {{ part.text | trim }}{% endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments.items() | list }}{% endfor %}<|end|>
{% endfor -%}
{%- if add_generation_prompt %}<|turn|>ASSISTANT {% endif %}"""

# What the recording was made with: neither tools nor tool calls.
PLAIN = json.loads((GOLDEN / "tokenizer_config.json").read_text())["chat_template"]

TEMPLATES = {"full": FULL, "parts": PARTS, "plain": PLAIN}


def write_model(directory: Path, template: str) -> Path:
    """The recorded tokenizer and configuration with `template` as the chat template."""
    shutil.copytree(GOLDEN, directory, dirs_exist_ok=True)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return directory
