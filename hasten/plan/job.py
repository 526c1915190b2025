"""What is to be computed: batch, length, precision and how the step is run."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Job(BaseModel):
    """One training job. Frozen; unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int = Field(gt=0)
    """Sequences of one step over all devices."""
    sequence: int = Field(gt=0)
    """Tokens of one sequence."""
    tokens_total: float = Field(default=0, ge=0)
    """Tokens of the whole run; 0: not asked."""
    precision: Literal["bf16", "fp16", "fp32", "fp8", "fp4"] = "bf16"
    """Of the matrix products."""
    master: Literal["split", "fp32", "none"] = "split"
    """split: 16-bit weights beside fp32 masters (Megatron, DeepSpeed); fp32: fp32 weights cast where they are
    used (FSDP mixed precision); none: weights, gradients and moments all in the 16-bit format."""
    gradient_bytes: int = Field(default=0, ge=0)
    """Bytes of one element of the gradient that is kept; 0: 4, or 2 where there is no fp32 master."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    attention: Literal["flash", "materialised"] = "flash"
    causal: bool = True
    overlap_gradients: bool = True
    """The data-parallel reduction runs beside the backward pass of the last micro batch."""
    reduce_whole: bool = False
    """With ZeRO-1, gradients are all-reduced as they are kept instead of scattered: DeepSpeed's pipeline
    engine (`_bf16_reduce_grads` reduces fp32 buffers)."""
    overlap_tensor: bool = False
    """Tensor-parallel collectives are cut up and run beside their matrix products."""
    dispatch: Literal["pairs", "tokens"] = "pairs"
    """How tokens reach their experts. pairs: one copy for each expert (an all-to-all); tokens: one for each
    node and device that has some of them (DeepEP)."""
    compiled: bool = False
    """Elementwise operators are fused and kernels launched from a graph."""
    dropout: bool = False
    head_chunk: int = Field(default=0, ge=0)
    """Tokens for which logits exist at once; 0: all of the micro batch."""
    gathers_per_layer: int = Field(default=1, gt=0)
    """Collectives in which ZeRO-3 gathers one layer: FSDP one, DeepSpeed one for each tensor."""
    fused_accumulation: bool = False
    """The product that makes a weight's gradient adds to the kept one itself."""
    blocking: bool = False
    """The host waits for each kernel (CUDA_LAUNCH_BLOCKING=1), so its time and the device's add up."""
    adapters: bool = False
    """Only small adapters are trained (LoRA): no gradient and no optimizer state of the model's own
    weights."""
    fused_loss: bool = False
    """The loss is compiled too: neither fp32 logits nor their probabilities are written to memory."""
