"""What one server holds: the models behind it and whether it still takes requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hasten.base.errors import nearest
from hasten.serve.http.errors import ApiError, bad_request
from hasten.serve.http.limits import HttpSettings
from hasten.serve.http.metrics import Metrics
from hasten.serve.http.template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hasten.serve.embed import Embedder
    from hasten.serve.stream import Request, Stream


class EngineLike(Protocol):
    """The part of `hasten.serve.engine.Engine` that the door uses."""

    def submit(self, request: Request) -> Stream: ...

    def stats(self) -> Any: ...

    def stop(self, drain_s: float = 0.0) -> None: ...


@dataclass(frozen=True)
class TextModel:
    """A model that generates.

    `defaults`: sampling settings of requests that do not name them (the model's own recommendation).
    `grammar(kind, schema)`: a compiled constraint for `SamplingParams.grammar`; kinds are `json_object` and
    `json_schema`. Raises UserError for a schema that cannot be compiled.
    """

    id: str
    engine: EngineLike
    tokenizer: Tokenizer
    context_tokens: int
    vocab_size: int
    template: ChatTemplate | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    grammar: Callable[[str, Mapping[str, Any] | None], Any] | None = None
    bytes_of: Callable[[int], bytes] = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        from hasten.serve.text import TokenBytes

        object.__setattr__(self, "bytes_of", TokenBytes(self.tokenizer))


class State:
    """One server. `draining` is set once it takes no more requests."""

    def __init__(
        self,
        settings: HttpSettings,
        text: TextModel | None = None,
        embedder: Embedder | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`metrics`: the observer that the engine was made with; its counts are read from the engine."""
        self.settings, self.text, self.embedder = settings, text, embedder
        self.metrics = metrics or Metrics(text.id if text is not None else "")
        if text is not None:
            self.metrics.watch(text.engine)
        self.draining = False

    def model_ids(self) -> list[tuple[str, int]]:
        models = (self.text, self.embedder)
        return [(model.id, model.created) for model in models if model is not None]

    def text_model(self, name: str | None) -> TextModel:
        """The model to generate with; no name means the only one there is."""
        self.check_model(name)
        if self.text is None:
            raise bad_request("this server has no model that generates; it makes embeddings", "model")
        if name is not None and name != self.text.id:
            raise bad_request(f"{name!r} makes embeddings; {self.text.id!r} generates", "model")
        return self.text

    def embedding_model(self, name: str | None) -> Embedder:
        self.check_model(name)
        if self.embedder is None:
            raise bad_request(
                "this server has no model for embeddings; start it with --embeddings MODEL", "model"
            )
        if name is not None and name != self.embedder.id:
            raise bad_request(f"{name!r} generates; {self.embedder.id!r} makes embeddings", "model")
        return self.embedder

    def check_model(self, name: str | None) -> None:
        """Raises a 404 for a name that is not served."""
        known = [model for model, _ in self.model_ids()]
        if name is not None and name not in known:
            raise ApiError(
                404,
                f"the model {name!r} is not here; {nearest(name, known)}",
                param="model",
                code="model_not_found",
            )
