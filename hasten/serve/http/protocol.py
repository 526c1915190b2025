"""The bodies that the server reads, checked: one model for each endpoint.

A field of OpenAI's that cannot be honoured is a 400 that says so, unless the value given asks for nothing.
What is not in the models is ignored, or refused with `strict`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, ValidationError

from hasten.base.errors import nearest
from hasten.serve.http.errors import bad_request, from_validation
from hasten.serve.http.limits import Limits


class _FirstFault(FailFast):
    """Of a list: stop at its first fault. A body of megabytes would else cost seconds in complaints.

    Hashable, as members of a union must be.
    """

    __hash__ = object.__hash__


FIRST_FAULT = _FirstFault()
_SEED = 2**63
_MOST_BIASES = 4096
Name = Annotated[str, Field(max_length=512)]


def _one_or_many(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError("must be a string or a list of strings")


def _texts_or_tokens(value: Any) -> list[Any]:
    """Texts and lists of token ids, one entry for each; a single one may stand alone."""
    kinds = "must be a string, a list of strings, a list of token ids, or a list of such lists"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(kinds)
    if value and all(type(item) is int for item in value):
        return [value]
    for index, item in enumerate(value):
        is_tokens = isinstance(item, list) and all(type(token) is int for token in item)
        if not isinstance(item, str) and not is_tokens:
            raise ValueError(f"{kinds}; number {index} is none of them")
    return value


def _numbers_by_token(value: Any) -> Any:
    """JSON keys are strings; a token id is a number."""
    if not isinstance(value, dict):
        return value
    if len(value) > _MOST_BIASES:
        raise ValueError(f"at most {_MOST_BIASES} tokens, got {len(value)}")
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 for key in value):
        raise ValueError("keys must be token ids")
    return {int(key): number for key, number in value.items()}


TextsOrTokens = Annotated[Any, PlainValidator(_texts_or_tokens)]
"""As a list with an entry for each: str, or list[int]."""


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body):
    """What both kinds of completion share: OpenAI's fields, then the common ones of open servers."""

    model: Name | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(_one_or_many)] = []
    seed: int | None = Field(None, ge=-_SEED, lt=_SEED)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[
            dict[int, Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_numbers_by_token, dict[str, Any]),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FIRST_FAULT] | None = None

    def check(self, limits: Limits) -> None:
        """What bounds and combinations say; raises a 400."""
        if (self.n or 1) > limits.choices:
            raise bad_request(f"n: at most {limits.choices}, got {self.n}", "n")
        if len(self.stop) > limits.stops:
            raise bad_request(f"stop: at most {limits.stops} strings, got {len(self.stop)}", "stop")
        if any(not 0 < len(text) <= limits.stop_characters for text in self.stop):
            raise bad_request(
                f"stop: a stop string has 1 to {limits.stop_characters} characters, got one of "
                f"{next(len(text) for text in self.stop if not 0 < len(text) <= limits.stop_characters)}",
                "stop",
            )
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Function(Body):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Part(Body):
    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], FIRST_FAULT] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_FAULT] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class JsonSchema(Body):
    model_config = ConfigDict(protected_namespaces=())
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], FIRST_FAULT] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], FIRST_FAULT] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Known to OpenAI's clients; honoured only where the value asks for nothing.
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    metadata: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    web_search_options: Any = None

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if self.max_tokens == 0:
            raise bad_request("max_tokens: at least 1, got 0", "max_tokens")
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
            if self.top_logprobs > limits.top_logprobs:
                raise bad_request(
                    f"top_logprobs: at most {limits.top_logprobs}, got {self.top_logprobs}", "top_logprobs"
                )
        self._check_tools(limits)
        if self.response_format is not None and self.response_format.type == "json_schema":
            described = self.response_format.json_schema
            if described is None or described.schema_ is None:
                raise bad_request(
                    "response_format of type json_schema needs json_schema.schema",
                    "response_format.json_schema",
                )
        refuse(self, _CHAT_REFUSED)

    def _check_tools(self, limits: Limits) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(names) > limits.tools:
            raise bad_request(f"tools: at most {limits.tools}, got {len(names)}", "tools")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise bad_request(f"tools: two functions are named {twice!r}", "tools")
        choice = self.tool_choice
        if choice in (None, "none"):
            return
        if not names:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if isinstance(choice, NamedChoice) and (name := choice.function.name) not in names:
            raise bad_request(
                f"tool_choice: no tool is named {name!r}; {nearest(name, names)}", "tool_choice"
            )

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: TextsOrTokens = ""
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None
    response_format: ResponseFormat | None = None

    def check(self, limits: Limits) -> None:
        super().check(limits)
        most = limits.top_logprobs // 4
        if self.logprobs is not None and self.logprobs > most:
            raise bad_request(f"logprobs: at most {most}, got {self.logprobs}", "logprobs")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of: candidates are not ranked here; give n alone", "best_of")
        if self.suffix:
            raise bad_request("suffix: text cannot be inserted between two texts here", "suffix")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens: 0 needs echo: true", "max_tokens")
        if self.response_format is not None and self.response_format.type != "text":
            raise bad_request("response_format belongs to /v1/chat/completions", "response_format")

    def prompts(self, limits: Limits) -> list[str | list[int]]:
        """One entry for each prompt: text, or token ids."""
        prompts: list[str | list[int]] = self.prompt
        if not prompts:
            raise bad_request("prompt is empty", "prompt")
        if len(prompts) * (self.n or 1) > limits.choices:
            raise bad_request(
                f"prompt: prompts times n is at most {limits.choices}, got {len(prompts) * (self.n or 1)}",
                "prompt",
            )
        return prompts


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: Name | None = None
    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    user: str | None = None

    def inputs(self, limits: Limits) -> list[str | list[int]]:
        inputs: list[str | list[int]] = self.input
        if not inputs:
            raise bad_request("input is empty", "input")
        if len(inputs) > limits.inputs:
            raise bad_request(f"input: at most {limits.inputs} texts, got {len(inputs)}", "input")
        for index, item in enumerate(inputs):
            if not item:
                raise bad_request(f"input[{index}] is empty", "input")
        return inputs


# Field -> the values that ask for nothing, and what to say of the others.
_CHAT_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "this server speaks text only"),
    "functions": (([],), "deprecated by OpenAI; give tools"),
    "function_call": (("none",), "deprecated by OpenAI; give tool_choice"),
    "modalities": (([], ["text"]), "this server speaks text only"),
    "moderation": ((), "nothing is moderated here"),
    "prompt_cache_options": (({},), "the prefix cache has no settings in a request"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored here"),
    "verbosity": (("medium",), "models here have no such setting"),
    "web_search_options": ((), "this server has no web search"),
}


def refuse(body: Body, table: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    for name, (harmless, reason) in table.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise bad_request(f"{name} is not supported: {reason}", name, "unsupported_parameter")


_B = TypeVar("_B", bound=Body)


def parse(kind: type[_B], data: bytes, strict: bool) -> _B:
    """The body as `kind`, or a 400 that names the field at fault."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error) from None
    if strict and (unknown := _unknown(body, "")):
        path, known = unknown
        raise bad_request(
            f"unknown field {path!r}; {nearest(path.rpartition('.')[2], known)}", path, "unknown_parameter"
        )
    return body


def _unknown(body: BaseModel, prefix: str) -> tuple[str, list[str]] | None:
    """The first field that no model knows, and the names that are known there."""
    fields = type(body).model_fields
    for name in body.model_extra or {}:
        return prefix + name, [field.alias or known for known, field in fields.items()]
    for name, field in fields.items():
        value = getattr(body, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, BaseModel) and (found := _unknown(item, f"{prefix}{field.alias or name}.")):
                return found
    return None
