"""From the messages of a chat request to what a chat template reads."""

from __future__ import annotations

import json
from typing import Any

from hasten.serve.http.errors import bad_request
from hasten.serve.http.protocol import ChatBody, Message, Part
from hasten.serve.http.template import ChatTemplate, TemplateRefusal

_RESERVED = ("messages", "tools", "documents")
_TOOL_WORDS = """You may call functions to help with the user's request. These functions exist:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON, in this form:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def render_prompt(body: ChatBody, template: ChatTemplate) -> str:
    """The prompt's text; what the template refuses is a 400 with the template's words."""
    more = dict(body.chat_template_kwargs or {})
    if taken := next((name for name in _RESERVED if name in more), None):
        raise bad_request(f"chat_template_kwargs may not set {taken!r}", "chat_template_kwargs")
    if body.reasoning_effort is not None:
        if not template.reads("reasoning_effort"):
            if body.reasoning_effort != "none":
                raise bad_request(
                    "reasoning_effort is not supported: this model's chat template does not know it",
                    "reasoning_effort",
                    "unsupported_parameter",
                )
        else:
            more.setdefault("reasoning_effort", body.reasoning_effort)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.uses_tools else None
    messages = [_message(index, message) for index, message in enumerate(body.messages)]
    if not template.reads("tools"):
        messages, tools = _written_out(messages, tools), None
    generation_prompt = more.pop("add_generation_prompt", True)
    try:
        return template.render(messages, tools, bool(generation_prompt), more)
    except TemplateRefusal as refusal:
        raise bad_request(f"the model's chat template refuses this chat: {refusal}", "messages") from refusal


def _written_out(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools, calls and their results as plain messages, for a template that has no place for them.

    The words around them are those of Hermes, the most common form among open models.
    """
    written: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        message = dict(message)
        if calls := message.pop("tool_calls"):
            written_calls = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            texts = [f"<tool_call>\n{call}\n</tool_call>" for call in written_calls]
            message["content"] = "\n".join([text for text in (message["content"], *texts) if text])
        is_result = message["role"] == "tool"
        if is_result:
            message |= {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            message["tool_call_id"] = None
        before = written[-1] if written else None
        if before is not None and before["role"] == message["role"] == "user" and (is_result or was_result):
            # Results of several calls, or a result and a question: many templates want roles in turn.
            before["content"] += "\n" + message["content"]
        else:
            written.append(message)
        was_result = is_result
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        words = _TOOL_WORDS.format(tools=listed)
        if written and written[0]["role"] == "system":
            written[0]["content"] += "\n\n" + words
        else:
            written.insert(0, {"role": "system", "content": words})
    return written


def _message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    # Templates know neither OpenAI's newer name of the system's role nor the older one of a tool's.
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_text(part, f"{where}.content[{place}]") for place, part in enumerate(content))
    if content is None and not message.tool_calls:
        if message.role == "assistant" and message.refusal is not None:
            content = message.refusal
        else:
            raise bad_request(
                f"{where}.content is required", f"{where}.content", "missing_required_parameter"
            )
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in message.tool_calls or ()
    ]
    if calls and role != "assistant":
        raise bad_request(f"{where}.tool_calls belongs to an assistant's message", f"{where}.tool_calls")
    return {
        "role": role,
        # Templates compare and add texts; a call without words has an empty one.
        "content": content or "",
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }


def _text(part: Part, where: str) -> str:
    if part.type not in ("text", "refusal"):
        raise bad_request(
            f"{where}: this model reads text; a part of type {part.type!r} cannot be used",
            where,
            "unsupported_content",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise bad_request(
            f"{where}.{part.type} is required", f"{where}.{part.type}", "missing_required_parameter"
        )
    return text


def _arguments(text: str) -> Any:
    """Templates write arguments with `tojson`, so they want the object and not its text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
