"""Chat templates give what transformers gives."""
# ruff: noqa: E501 (templates stand as models have them)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_world import byte_tokenizer

from hasten.base.errors import InputError
from hasten.serve.http.template import ChatTemplate, TemplateRefusal, template_of_folder

# SmolLM2-Instruct's, as its file has it.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# After Llama 3.1's: blocks over several lines, tojson with indent, strftime_now, a macro-free list of tools.
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# After Mistral's: namespaces, alternation that is checked, tools before the last message, loop controls.
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}{{- " " + message["content"]|trim + eos_token}}{%- endgeneration %}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
    {%- if message.role == "stop" %}{% break %}{%- endif %}
{%- endfor %}
"""
TEMPLATES = {"smollm2": SMOLLM2, "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": 'Größe & <b>"Fakten"</b>',
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "enum": ["a", "b"]}}},
        },
    }
]
SHORT = [{"role": "user", "content": "  Hi <there> & 'you'  "}]
LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Ünïcode 😀\nline"},
    {"role": "assistant", "content": " sure "},
    {"role": "user", "content": "again", "name": None},
]
CALLED = [
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": {"q": "ä"}}}
        ],
    },
    {"role": "tool", "content": "found", "tool_call_id": "abcdefghi"},
]


def transformers_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **TOKENS)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [SHORT, LONG, CALLED], ids=["short", "long", "called"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_equal_to_transformers(name: str, messages: Any, tools: Any, prompt: bool) -> None:
    ours = ChatTemplate(TEMPLATES[name], TOKENS).render(messages, tools, prompt)
    theirs = transformers_tokenizer().apply_chat_template(
        messages, tools, chat_template=TEMPLATES[name], add_generation_prompt=prompt, tokenize=False
    )
    assert ours == theirs


def test_arguments_of_the_caller_and_named_templates() -> None:
    texts = {"default": "{{ greeting }}", "tool_use": "{{ tools | length }} tools"}
    template = ChatTemplate(texts)
    assert template.render(SHORT, more={"greeting": "hello"}) == "hello"
    assert template.render(SHORT, TOOLS) == "1 tools"
    assert template.reads("greeting")
    assert not template.reads("effort")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(_x=1) %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ],
)
def test_a_template_that_refuses_or_fails(source: str) -> None:
    with pytest.raises(TemplateRefusal):
        ChatTemplate(source).render(SHORT)


def test_a_template_that_is_damaged() -> None:
    with pytest.raises(InputError, match="damaged at line 2"):
        ChatTemplate("one\n{% if %}")
    with pytest.raises(InputError, match="no chat template is named 'default'"):
        ChatTemplate({"rag": "x"})


def test_the_template_of_a_folder(tmp_path: Path) -> None:
    assert template_of_folder(tmp_path) is None
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}1",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert _render(tmp_path) == "<s>1"
    config["chat_template"] = [{"name": "default", "template": "{{ eos_token }}2"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert _render(tmp_path) == "</s>2"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}3")
    assert _render(tmp_path) == "<s>3"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        template_of_folder(tmp_path)


def _render(folder: Path) -> str:
    template = template_of_folder(folder)
    assert template is not None
    return template.render(SHORT)


def test_a_folder_saved_by_transformers(tmp_path: Path) -> None:
    tokenizer = transformers_tokenizer()
    tokenizer.chat_template = {"default": MISTRAL, "tool_use": LLAMA3}
    tokenizer.save_pretrained(tmp_path)
    template = template_of_folder(tmp_path)
    assert template is not None
    for tools in (None, TOOLS):
        assert template.render(LONG, tools) == tokenizer.apply_chat_template(
            LONG, tools, add_generation_prompt=True, tokenize=False
        )
