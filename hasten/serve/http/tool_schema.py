"""The JSON schema of an answer that must be a tool call."""

from __future__ import annotations

from typing import Any

from hasten.serve.http.protocol import ChatBody, NamedChoice


def forced_schema(body: ChatBody) -> dict[str, Any] | None:
    """The JSON schema of the whole answer, where `tool_choice` is `required` or names a function."""
    parameters = {
        tool.function.name: tool.function.parameters or {"type": "object", "properties": {}}
        for tool in body.tools or ()
    }
    if isinstance(body.tool_choice, NamedChoice):
        return parameters[body.tool_choice.function.name]
    if body.tool_choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = []
    for number, (name, schema) in enumerate(parameters.items()):
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": _moved(schema, f"tool{number}", definitions),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "minItems": 1, **most, "items": items} | (
        {"$defs": definitions} if definitions else {}
    )


def _moved(schema: dict[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """`schema` for a place inside another one: its definitions go to the root under names of their own."""

    def rewrite(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: _moved_reference(item, prefix)
                if key == "$ref" and isinstance(item, str)
                else rewrite(item)
                for key, item in value.items()
            }
        return [rewrite(item) for item in value] if isinstance(value, list) else value

    for group in ("$defs", "definitions"):
        for name, item in (schema.get(group) or {}).items():
            definitions[f"{prefix}.{name}"] = rewrite(item)
    return rewrite({key: value for key, value in schema.items() if key not in ("$defs", "definitions")})


def _moved_reference(reference: str, prefix: str) -> str:
    for group in ("#/$defs/", "#/definitions/"):
        if reference.startswith(group):
            return f"#/$defs/{prefix}.{reference.removeprefix(group)}"
    return reference
