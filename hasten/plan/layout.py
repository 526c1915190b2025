"""How a run is spread over devices, and what it keeps and recomputes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hasten.base.errors import ConfigError
from hasten.plan.model import ModelShape

Recompute = Literal["none", "selective", "operators", "full"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero_bubble"]


class Layout(BaseModel):
    """Degrees of parallelism and the memory plan. Frozen; unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: int = Field(default=1, gt=0)
    """Tensor parallel degree."""
    sp: bool = False
    """Sequence parallel: norms and residuals are split over the tensor parallel group too."""
    cp: int = Field(default=1, gt=0)
    """Context parallel degree (ring attention)."""
    pp: int = Field(default=1, gt=0)
    virtual: int = Field(default=1, gt=0)
    """Model chunks per pipeline stage (interleaved schedule)."""
    ep: int = Field(default=1, gt=0)
    """Expert parallel degree; its devices are taken from data x context parallelism."""
    dp: int = Field(default=1, gt=0)
    zero: int = Field(default=0, ge=0, le=3)
    """0: all replicated; 1: optimizer states are sharded over dp x cp; 2: gradients too; 3: parameters
    too."""
    shard: int = Field(default=0, ge=0)
    """Devices over which `zero` shards; 0: all of dp x cp. Fewer is a hybrid (HSDP)."""
    micro_batch: int = Field(default=1, gt=0)
    """Sequences that pass at once."""
    accumulation: int = Field(default=1, gt=0)
    """Micro batches of one replica per step."""
    recompute: Recompute = "none"
    """full: only a layer's input is kept; selective: the inside of materialised attention is rebuilt (arXiv
    2205.05198; nothing with flash attention, which rebuilds it anyway); operators: attention and every other
    matrix product are kept (torchtitan)."""
    recompute_layers: int | None = Field(default=None, ge=0)
    """Of a stage's layers, how many follow `recompute`; None: all."""
    offload: Literal["none", "optimizer", "activations"] = "none"
    schedule: Schedule = "1f1b"
    stages: tuple[int, ...] | None = None
    """Layers of each stage (of each chunk in order where virtual > 1); None: as even as can be."""

    @model_validator(mode="after")
    def _consistent(self) -> Layout:
        if self.sp and self.tp == 1:
            raise ValueError("sp needs tp > 1")
        if self.virtual > 1 and self.pp == 1:
            raise ValueError(f"virtual = {self.virtual} needs pp > 1")
        if self.virtual > 1 and self.schedule not in ("interleaved", "1f1b"):
            raise ValueError(
                f"virtual = {self.virtual} needs schedule = 'interleaved', not {self.schedule!r}"
            )
        if self.stages is not None and len(self.stages) != self.pp * self.virtual:
            raise ValueError(
                f"stages has {len(self.stages)} entries; pp x virtual = {self.pp * self.virtual}"
            )
        return self

    @property
    def devices(self) -> int:
        """Devices that the layout occupies."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def batch(self) -> int:
        """Sequences of one step."""
        return self.dp * self.micro_batch * self.accumulation

    def chunks(self, layers: int) -> tuple[int, ...]:
        """Layers of each of the pp x virtual chunks, in the order in which a token passes them.

        The remainder goes to the middle, away from the chunks that hold the embedding and the head.
        """
        if self.stages is not None:
            return self.stages
        count = self.pp * self.virtual
        base, more = divmod(layers, count)
        first = (count - more) // 2
        return tuple(base + (first <= index < first + more) for index in range(count))

    def check(self, model: ModelShape) -> None:
        """Whether the model can be cut this way.

        Raises:
            ConfigError: a size is not divided; the message names the nearest degree that divides it.
        """
        if sum(self.chunks(model.layers)) != model.layers:
            raise ConfigError(
                f"stages = {self.stages} holds {sum(self.chunks(model.layers))} layers; the model has "
                f"{model.layers}"
            )
        # The embedding and the head may have chunks of their own.
        if self.pp * self.virtual > model.layers + 2:
            raise ConfigError(
                f"pp x virtual = {self.pp * self.virtual} is more than the model's {model.layers} layers"
            )
        if model.heads % self.tp:
            near = max(d for d in range(1, self.tp + 1) if model.heads % d == 0)
            raise ConfigError(
                f"tp = {self.tp} does not divide the {model.heads} heads; the nearest that does is {near}"
            )
        if self.ep > 1 and (not model.experts or model.experts % self.ep):
            raise ConfigError(f"ep = {self.ep} does not divide the model's {model.experts} experts")
        if self.ep > 1 and (self.dp * self.cp * self.tp) % self.ep:
            raise ConfigError(f"ep = {self.ep} does not divide dp x cp x tp = {self.dp * self.cp * self.tp}")

    def describe(self) -> str:
        """The layout on one line, degrees of one left out."""
        words = [
            f"{key}={value}" for key in ("tp", "cp", "pp", "ep", "dp") if (value := getattr(self, key)) > 1
        ]
        words += [f"virtual={self.virtual}"] if self.virtual > 1 else []
        words += ["sp"] if self.sp else []
        words += [f"zero={self.zero}"] if self.zero else []
        words += [
            f"micro_batch={self.micro_batch}",
            f"accumulation={self.accumulation}",
            f"recompute={self.recompute}",
        ]
        words += [f"recompute_layers={self.recompute_layers}"] if self.recompute_layers is not None else []
        words += ["stages=" + "/".join(map(str, self.stages))] if self.stages is not None else []
        words += [f"offload={self.offload}"] if self.offload != "none" else []
        words += [self.schedule] if self.pp > 1 else []
        return " ".join(words)
