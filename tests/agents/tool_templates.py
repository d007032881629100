"""The templates of `tests/data/chat_templates.py` with their parts for tools, and tokenizers with these templates."""

from __future__ import annotations

from pathlib import Path

from mrl.data.chat import ChatTokenizer
from tests.data.chat_templates import LLAMA_3_1, MISTRAL_0_3, QWEN_2_5, QWEN_3, as_published, save_tokenizer

_QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
"""
_QWEN_CALLS = """\
{%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
"""
_QWEN_RESULTS = """\
{%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
_LLAMA_TOOLS = """\
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven these functions:\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {%- if not messages %}{{- raise_exception('there is no first user message') }}{%- endif %}
    {{- messages[0]['content'] | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('a single call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}
        {%- continue %}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
        {%- continue %}
    {%- endif %}
"""


def _qwen(template: str, ends: str) -> str:
    """Put the parts for tools into one of Qwen's templates, whose turns end with this piece."""
    with_calls = template.replace(ends, _QWEN_CALLS + ends)
    head, _, tail = with_calls.rpartition("    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt")
    assert with_calls != template, "the template's turns end otherwise"
    results = f"    {_QWEN_RESULTS}    {{%- endif %}}\n{{%- endfor %}}\n{{%- if add_generation_prompt"
    return _QWEN_TOOLS + head + results + tail


WITH_TOOLS = {
    "qwen2.5": _qwen(
        as_published(QWEN_2_5)
        .replace("{%- if messages[0]['role'] != 'system' %}", "{%- if not tools and messages[0]['role'] != 'system' %}")
        .replace("{{- message.content + '<|im_end|>' }}", "{{- message.content }}\n        {{- '<|im_end|>' }}")
        .replace(
            "{%- else %}\n        {{- '<|im_start|>' + message.role",
            "{%- elif message.role != 'tool' and not (tools and loop.first and message.role == 'system') %}"
            "\n        {{- '<|im_start|>' + message.role",
        ),
        "{{- '<|im_end|>' }}",
    ),
    "qwen3": _qwen(
        as_published(QWEN_3).replace(
            'or message.role == "system" %}', 'or (message.role == "system" and not (tools and loop.first)) %}'
        ),
        "{{- '<|im_end|>' }}",
    ),
    "llama3.1": as_published(LLAMA_3_1).replace("{%- for message in messages %}\n", _LLAMA_TOOLS),
    "mistral0.3": as_published(MISTRAL_0_3),
}


def tokenizer_with_tools(name: str, directory: Path) -> ChatTokenizer:
    """Return a tokenizer with this template. `<|eom_id|>` is also a control token of Llama."""
    tokenizer = save_tokenizer(name, directory)
    tokenizer.chat_template = WITH_TOOLS[name]
    return tokenizer
