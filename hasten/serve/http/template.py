"""Chat templates: a model's own Jinja text, rendered as transformers does, without transformers.

Importing transformers' tokenizer classes takes seconds; a template needs only Jinja's sandbox and the few
names that templates expect: `raise_exception`, `strftime_now`, `tojson` without HTML escapes, and loop
controls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hasten.base.errors import InputError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateRefusal(ValueError):  # noqa: N818
    """The template itself said no (`raise_exception`), or cannot work with these messages."""


class ChatTemplate:
    """One model's template.

    Args:
        source: Jinja text, or texts by name; `tool_use` is taken where tools are given, else `default`.
        special_tokens: `bos_token`, `eos_token` and so on, as the template names them.

    Raises:
        InputError: for a text that is no valid Jinja.
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        texts = {"default": source} if isinstance(source, str) else dict(source)
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in texts.items()}
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"the chat template is damaged at line {error.lineno}: {error.message}"
            ) from error
        if "default" not in self._templates and "tool_use" not in self._templates:
            raise InputError(
                f"no chat template is named 'default'; there are: {', '.join(texts) or '(none)'}"
            )
        self._texts = texts
        self._special_tokens = dict(special_tokens or {})

    def reads(self, name: str) -> bool:
        """Whether a text of the template speaks of `name` at all."""
        return any(name in text for text in self._texts.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; `more` are names that the template may read. Keys whose value is None are left
        out of messages, as transformers does.

        Raises TemplateRefusal with the template's own words.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or self._templates["tool_use"]
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return template.render(
                self._special_tokens
                | {"documents": None}
                | dict(more or {})
                | {"messages": plain, "tools": tools, "add_generation_prompt": add_generation_prompt}
            )
        except jinja2.TemplateError as error:
            raise TemplateRefusal(error.message or type(error).__name__) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template that adds None to a text, or iterates over a number that a caller gave it.
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore: a template comes from a stranger."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _refuse_private(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r} on a namespace")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _dict
    environment.globals["namespace"] = _Namespace
    return environment


def template_of_folder(folder: Path) -> ChatTemplate | None:
    """The template of a Hugging Face folder, or None: `chat_template.jinja` and `additional_chat_templates/`,
    else `chat_template` in `tokenizer_config.json`.

    Raises InputError for a damaged file.
    """
    config = _json(folder / "tokenizer_config.json")
    tokens = _json(folder / "special_tokens_map.json") | config
    texts: dict[str, str] = {}
    stored = config.get("chat_template")
    if isinstance(stored, str):
        texts["default"] = stored
    elif isinstance(stored, list):
        texts |= {entry["name"]: entry["template"] for entry in stored}
    elif isinstance(stored, dict):
        texts |= stored
    if (file := folder / "chat_template.jinja").is_file():
        texts["default"] = file.read_text("utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        texts[file.stem] = file.read_text("utf-8")
    return ChatTemplate(texts, special_tokens(tokens)) if texts else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and so on out of a tokenizer's settings: each a text, or an object with `content`."""
    found = {name: config.get(name) for name in _SPECIAL}
    return {
        name: value["content"] if isinstance(value, Mapping) else str(value)
        for name, value in found.items()
        if value is not None
    }


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no object")
    return value
