"""What a program needs beside its weights to read and write text, as data: no transformers to load it.

The tokenizer as the `tokenizers` library writes it, the chat template, special tokens, the tokens that end an
answer and the model's own defaults for sampling.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hasten.base.errors import InputError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_DEFAULTS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Words:
    """The text side of a model. Lists and dictionaries as JSON has them."""

    tokenizer_json: str
    """Empty where the model came without a tokenizer."""
    chat_template: str | dict[str, str] | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    """`bos_token` and so on -> its text; the names that chat templates use."""
    special_ids: dict[str, int] = field(default_factory=dict)
    eos_token_ids: list[int] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)
    """Where the model sets them: do_sample, temperature, top_k, top_p, min_p, repetition_penalty."""
    context_tokens: int | None = None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, without padding and without truncation. Raises InputError where there is none."""
        from tokenizers import Tokenizer

        if not self.tokenizer_json:
            raise InputError(
                "this model came without a tokenizer; give token ids, or a folder that holds one"
            )
        try:
            return Tokenizer.from_str(self.tokenizer_json)
        except Exception as error:  # the library raises nothing narrower
            raise InputError(f"the stored tokenizer cannot be read: {first_line(error)}") from error

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Words:
        """Raises ValueError or TypeError for what `to_json` did not write."""
        return cls(**json.loads(text))


def words_of(model: Any, tokenizer: Any) -> Words:
    """The text side of a transformers model and its tokenizer (None where there is none).

    Raises InputError for a tokenizer that is not one of the `tokenizers` library.
    """
    generation = getattr(model, "generation_config", None)
    config = model.config.get_text_config()
    defaults = {name: value for name in _DEFAULTS if (value := getattr(generation, name, None)) is not None}
    stops = getattr(generation, "eos_token_id", None)
    if stops is None:
        stops = getattr(config, "eos_token_id", None)
    if stops is None:
        stops = getattr(tokenizer, "eos_token_id", None)
    eos = (
        []
        if stops is None
        else [int(stop) for stop in (stops if isinstance(stops, (list, tuple)) else [stops])]
    )
    context = getattr(config, "max_position_embeddings", None)
    if tokenizer is None:
        return Words("", eos_token_ids=eos, generation=defaults, context_tokens=context)
    special = {name: token for name in _SPECIAL if (token := getattr(tokenizer, name, None)) is not None}
    return Words(
        _tokenizer_json(tokenizer),
        tokenizer.chat_template,
        {name: str(token) for name, token in special.items()},
        {name: int(getattr(tokenizer, f"{name}_id")) for name in special},
        eos,
        defaults,
        context,
    )


def _tokenizer_json(tokenizer: Any) -> str:
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"{type(tokenizer).__name__} is not a tokenizer of the tokenizers library; "
            "save a fast one (tokenizer.json) beside the model"
        )
    plain = Tokenizer.from_str(backend.to_str())
    plain.no_padding()
    plain.no_truncation()
    return str(plain.to_str())
