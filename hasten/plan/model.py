"""The shape of a Transformer, as far as its cost depends on it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hasten.base.errors import ConfigError, InputError, first_fault, nearest


class Latent(BaseModel):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks and head sizes, in elements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query_rank: int = Field(ge=0)
    """0: the query is one full projection."""
    key_value_rank: int = Field(gt=0)
    rotary_size: int = Field(gt=0)
    plain_size: int = Field(gt=0)
    value_size: int = Field(gt=0)


class ModelShape(BaseModel):
    """A decoder-only Transformer. Sizes are in elements. Frozen; unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "model"
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(default=0, ge=0)
    """Heads of keys and values; 0 means as many as `heads`."""
    head_size: int = Field(default=0, ge=0)
    """0 means `hidden / heads`."""
    inner: int = Field(gt=0)
    """Width of the dense feed-forward product."""
    gated: bool = True
    """Two up projections and an elementwise product (SwiGLU, GeGLU) rather than one."""
    vocabulary: int = Field(gt=0)
    tied: bool = False
    positions: Literal["rotary", "learned", "alibi"] = "rotary"
    max_positions: int = Field(default=0, ge=0)
    """Rows of a learned position table; 0 where there is none."""
    biases: bool = False
    norm: Literal["rms", "layer"] = "rms"
    window: int = Field(default=0, ge=0)
    """Attention window in tokens; 0: none."""
    window_every: int = Field(default=1, gt=0)
    """Of so many consecutive layers one has the window."""

    experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)
    expert_inner: int = Field(default=0, ge=0)
    shared_inner: int = Field(default=0, ge=0)
    """Width of the expert that every token visits; 0: none."""
    dense_layers: int = Field(default=0, ge=0)
    """With experts: the first so many layers have the dense feed-forward of width `inner`."""

    latent: Latent | None = None
    predicted_tokens: int = Field(default=0, ge=0)
    """Extra layers of multi-token prediction, each with its own projection and use of the head."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        values = dict(data)
        if not values.get("kv_heads"):
            values["kv_heads"] = values.get("heads", 0)
        if not values.get("head_size") and values.get("heads") and values.get("hidden"):
            if values["hidden"] % values["heads"]:
                raise ValueError(
                    f"hidden = {values['hidden']} is not divided by heads = {values['heads']}: give head_size"
                )
            values["head_size"] = values["hidden"] // values["heads"]
        if values.get("experts") and not values.get("expert_inner"):
            values["expert_inner"] = values.get("inner", 0)
        return values

    @model_validator(mode="after")
    def _consistent(self) -> ModelShape:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token = {self.experts_per_token}: give 1 to {self.experts}")
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers = {self.dense_layers} is more than layers = {self.layers}")
        return self

    # Parameters ------------------------------------------------------------------------------------------
    @cached_property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention projections (and their biases)."""
        if self.latent is not None:
            a = self.latent
            query = self.heads * (a.plain_size + a.rotary_size)
            asked = self.hidden * a.query_rank + a.query_rank * query if a.query_rank else self.hidden * query
            kept = self.hidden * (a.key_value_rank + a.rotary_size)
            kept += a.key_value_rank * self.heads * (a.plain_size + a.value_size)
            return asked + kept + self.heads * a.value_size * self.hidden
        query, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        weights = self.hidden * (2 * query + 2 * keys)
        return weights + (query + 2 * keys + self.hidden if self.biases else 0)

    def _feed_forward(self, inner: int) -> int:
        weights = (3 if self.gated else 2) * self.hidden * inner
        return weights + ((2 if self.gated else 1) * inner + self.hidden if self.biases else 0)

    @property
    def norm_parameters(self) -> int:
        """Of one layer: two norms."""
        return 2 * self.hidden * (2 if self.norm == "layer" else 1)

    def layer_parameters(self, index: int) -> int:
        """All weights of layer `index`."""
        return self.shared_layer_parameters(index) + self.expert_parameters(index)

    def shared_layer_parameters(self, index: int) -> int:
        """Weights of layer `index` that every token visits (all but the routed experts)."""
        own = self.attention_parameters + self.norm_parameters
        if not self.sparse(index):
            return own + self._feed_forward(self.inner)
        return (
            own
            + self.hidden * self.experts
            + (self._feed_forward(self.shared_inner) if self.shared_inner else 0)
        )

    def expert_parameters(self, index: int) -> int:
        """Weights of the routed experts of layer `index`; 0 in a dense layer."""
        return self.experts * self._feed_forward(self.expert_inner) if self.sparse(index) else 0

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has routed experts."""
        return self.experts > 0 and index >= self.dense_layers

    @property
    def embedding_parameters(self) -> int:
        """The input table and learned positions."""
        return self.vocabulary * self.hidden + (
            self.max_positions * self.hidden if self.positions == "learned" else 0
        )

    @property
    def head_parameters(self) -> int:
        """The output projection with the last norm; its weight counts also where it is tied."""
        return self.vocabulary * self.hidden + self.norm_parameters // 2

    @cached_property
    def parameters(self) -> int:
        """All weights, a tied head once."""
        body = sum(self.layer_parameters(index) for index in range(self.layers))
        head = self.norm_parameters // 2 if self.tied else self.head_parameters
        return body + self.embedding_parameters + head

    @cached_property
    def active_parameters(self) -> int:
        """Weights that one token visits: of the experts only those it is sent to."""
        idle = self.experts - self.experts_per_token
        return self.parameters - sum(
            idle * self._feed_forward(self.expert_inner) for index in range(self.layers) if self.sparse(index)
        )


def _build(values: Mapping[str, Any], where: str) -> ModelShape:
    try:
        return ModelShape(**values)
    except ValidationError as error:
        fault = first_fault(error)
        if fault.kind == "missing":
            raise InputError(
                f"{where}: the field {fault.field!r} is missing; a model needs layers, hidden, heads, inner "
                "and vocabulary"
            ) from None
        if fault.kind == "extra_forbidden":
            raise InputError(
                f"{where}: no field {fault.field!r}; {nearest(fault.field, ModelShape.model_fields)}"
            ) from None
        raise InputError(f"{where}: {fault.field + ': ' if fault.field else ''}{fault.said}") from None


# The names that model families of Hugging Face give to the same thing, in the order they are looked for.
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_size": ("head_dim", "kv_channels"),
    "inner": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "max_positions": ("max_position_embeddings", "n_positions", "seq_length"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "expert_inner": ("moe_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
}
_REQUIRED = ("layers", "hidden", "heads", "vocabulary")
# Families whose feed-forward has one up projection, whose positions are learned, or that use ALiBi.
_PLAIN = {
    "gpt2",
    "gpt_neox",
    "gpt_neo",
    "bloom",
    "opt",
    "mpt",
    "falcon",
    "phi",
    "starcoder2",
    "gptj",
    "gpt_bigcode",
}
_LEARNED = {"gpt2", "opt", "gpt_neo", "gpt_bigcode"}
_ALIBI = {"bloom", "mpt"}
_TIED = {"gpt2", "gemma", "gemma2", "gemma3_text", "bloom", "mpt", "opt", "falcon"}


def from_config(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The shape that a Hugging Face `config.json` describes.

    Raises:
        InputError: a field is missing or contradicts another; the message names it and its accepted names.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = {**config, **config["text_config"]}
    values: dict[str, Any] = {"name": str(config.get("_name_or_path") or name)}
    for field, names in _NAMES.items():
        found = next((config[given] for given in names if config.get(given) is not None), None)
        if found is not None:
            values[field] = found
        elif field in _REQUIRED:
            raise InputError(
                f"{name}: the config has no {' or '.join(names)}; the planner needs it as {field}"
            )
    family = str(config.get("model_type", ""))
    plain = family in _PLAIN
    if "inner" not in values:
        if not plain:
            raise InputError(
                f"{name}: the config has no {' or '.join(_NAMES['inner'])}; the planner needs it as inner"
            )
        values["inner"] = 4 * values["hidden"]
    values["gated"] = not plain
    values["positions"] = "learned" if family in _LEARNED else "alibi" if family in _ALIBI else "rotary"
    if values["positions"] != "learned":
        values.pop("max_positions", None)
    values["biases"] = family in _PLAIN - {"falcon", "mpt"}
    values["norm"] = "layer" if plain else "rms"
    values["tied"] = bool(config.get("tie_word_embeddings", family in _TIED))
    shared = config.get("shared_expert_intermediate_size") or int(config.get("n_shared_experts") or 0) * int(
        config.get("moe_intermediate_size") or 0
    )
    if shared:
        values["shared_inner"] = shared
    if not values.get("experts"):
        for field in ("experts", "experts_per_token", "expert_inner", "dense_layers", "shared_inner"):
            values.pop(field, None)
    if config.get("kv_lora_rank"):
        values["latent"] = {
            "query_rank": config.get("q_lora_rank") or 0,
            "key_value_rank": config["kv_lora_rank"],
            "rotary_size": config["qk_rope_head_dim"],
            "plain_size": config["qk_nope_head_dim"],
            "value_size": config["v_head_dim"],
        }
    return _build(values, name)


def presets() -> dict[str, dict[str, Any]]:
    """The models that can be named, from the package's `presets/models.toml`."""
    text = resources.files("hasten.plan").joinpath("presets/models.toml").read_text("utf-8")
    return tomllib.loads(text)


def preset(name: str) -> ModelShape:
    """A model by its short name.

    Raises:
        ConfigError: there is none of this name; the message lists those that there are.
    """
    known = presets()
    if name not in known:
        raise ConfigError(f"model {name!r} is not a preset; {nearest(name, known)}")
    values = {key: value for key, value in known[name].items() if key not in ("source", "confidence")}
    return _build({"name": name, **values}, f"preset {name}")


def load(path_or_id: str | Path) -> ModelShape:
    """A preset, a folder with `config.json`, a `config.json`, or a TOML file with the fields of `ModelShape`.

    Raises:
        InputError: the file is missing, malformed, or lacks a field.
    """
    path = Path(path_or_id)
    if not path.exists():
        if str(path_or_id) in presets():
            return preset(str(path_or_id))
        raise InputError(
            f"model {str(path_or_id)!r} is neither a file nor a preset; {nearest(str(path_or_id), presets())}"
        )
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise InputError(f"{path.parent} has no config.json")
    try:
        text = path.read_text("utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read as {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}"
        ) from None
    if path.suffix == ".toml":
        return _build({"name": path.stem, **data}, str(path))
    return from_config(data, str(path))
