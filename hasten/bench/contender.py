"""One contender in one process: `python -m hasten.bench.contender SPEC.json OUT.json [--end-with-parent]`.

Opens the model, takes the steps, continues the prompt, writes what it measured to OUT.json. On standard
output it sends one line of JSON for each thing that happened (see `child.EVENT`), for a progress bar.
With the flag it ends as soon as its standard input is closed (see `hasten.bench.child`).

Every contender does what a user would write. Training is
`model(input_ids, labels=..., position_ids=...).loss` without a cache, under autocast where it is bf16, then
`loss.backward()`, `optimizer.step()` and `optimizer.zero_grad()`; inference is `model(input_ids)` without
gradients, with weights in bf16 where it is bf16.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hasten.base.errors import HastenError
from hasten.bench.child import Emit, work
from hasten.bench.contenders import CONTENDERS, Kind, Spec
from hasten.bench.memory import peak_resident_bytes, resident_bytes
from hasten.bench.openvino_model import openvino_forward
from hasten.bench.report import Outcome, Round
from hasten.bench.tasks import check_task, loss_rounding, probe_loss
from hasten.bench.where import time_by_operator
from hasten.bench.workload import is_masked, model_size, open_workload_model, visible_keys


def run(spec: Spec, emit: Emit = lambda **event: None) -> Outcome:
    """Runs one contender in this process.

    Raises:
        HastenError: a loss is not finite.
        InputError: the model cannot be opened.
    """
    kind = CONTENDERS[spec.contender]
    if kind.buffer_reuse:
        from hasten.base import allocator

        allocator.enable()
    torch.manual_seed(spec.seed)
    begin = time.perf_counter()
    model, tokenizer = open_workload_model(spec.model, spec.seed)
    open_s = time.perf_counter() - begin
    size = model_size(model)
    infer = spec.task == "infer"
    if infer:
        # OpenVINO converts from fp32 and rounds itself.
        in_bf16 = kind.wants_bf16 and spec.bf16 and kind.engine != "openvino"
        model = model.base_model.to(torch.bfloat16 if in_bf16 else torch.float32)
    model.train(not infer)
    with np.load(spec.blocks_file) as blocks:
        columns = {name: torch.from_numpy(blocks[name]) for name in blocks.files}
    accepted = inspect.signature(model.forward).parameters
    columns = {name: values for name, values in columns.items() if name in accepted}
    # With a cache, which transformers makes by default, packed documents would see each other.
    settings = {"use_cache": False} if "use_cache" in accepted else {}
    rss_open = resident_bytes()
    emit(event="opened", seconds=open_s)

    torch.manual_seed(spec.seed)
    seconds: list[float] = []
    losses: list[float] = []
    peak_first, first_forward_s = 0, 0.0
    begin = time.perf_counter()
    # The price of preparing the model belongs to the first step.
    optimizer: Any = None
    if kind.engine == "openvino":
        shape = (spec.batch, columns["input_ids"].shape[1])
        forward = openvino_forward(model, settings, shape, spec.bf16)
    else:
        forward, optimizer = _prepare(model, kind, spec)

    def train_step(batch: dict[str, torch.Tensor]) -> tuple[float, float]:
        """(loss, when the forward pass ended)"""
        with _precision(kind, spec):
            loss = forward(**batch, **settings).loss
        forward_end = time.perf_counter()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), forward_end

    def infer_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return forward(**batch, **settings).last_hidden_state  # type: ignore[no-any-return]

    for step in range(spec.steps):
        rows = slice(step * spec.batch, (step + 1) * spec.batch)
        batch = {name: values[rows] for name, values in columns.items()}
        if infer:
            hidden = infer_step(batch)
            seconds.append(time.perf_counter() - begin)
            losses.append(probe_loss(hidden, batch["input_ids"]))
        else:
            loss, forward_end = train_step(batch)
            losses.append(loss)
            seconds.append(time.perf_counter() - begin)
            if step == 0:
                first_forward_s = forward_end - begin
        if not math.isfinite(losses[-1]):
            raise HastenError(f"{spec.contender}: the loss of step {step + 1} is {losses[-1]}")
        if step == 0:
            peak_first = peak_resident_bytes()
        emit(event="step", step=step + 1, seconds=seconds[-1], loss=losses[-1])
        begin = time.perf_counter()
    peak = peak_resident_bytes()
    rounding = None
    if kind.engine == "eager" and not infer and not (kind.wants_bf16 and spec.bf16):
        with torch.no_grad():
            result = forward(**batch, **settings)
            rounding = loss_rounding(
                result.loss.item(), result.logits, batch["labels"], check_task(spec.task)
            )
    text = None
    if spec.prompt is not None and tokenizer is not None:
        emit(event="continuing")
        text = _continue(model, tokenizer, kind, spec)
    where = None
    if spec.where and kind.engine != "openvino":
        emit(event="profiling")
        model.train(not infer)
        step_again = infer_step if infer else train_step
        count, tokens = batch["input_ids"].shape
        keys = visible_keys(count, tokens, batch.get("position_ids"), not is_masked(spec.model))
        where = time_by_operator(lambda: step_again(batch), 4.0 * keys * size.attention_width)
    measured = Round(
        open_s=open_s,
        first_forward_s=first_forward_s or seconds[0],
        first_step_s=seconds[0],
        steps_s=seconds,
        losses=losses,
        peak_rss_bytes=peak,
        rss_open_bytes=rss_open,
        peak_rss_first_step_bytes=peak_first,
        loss_rounding=rounding,
        text=text,
        where=where,
    )
    return Outcome(round=measured, size=size)


def _prepare(model: Any, kind: Kind, spec: Spec) -> tuple[Callable[..., Any], Any]:
    if kind.engine == "compile":
        return torch.compile(model), torch.optim.AdamW(model.parameters(), lr=spec.learning_rate)
    if kind.engine == "hasten":
        import hasten
        from hasten.ops.adamw.optimizer import AdamW

        hasten.optimize(model)
        # As `hasten train` does: this loop writes no weights behind the optimizer's back.
        return model, AdamW(model.parameters(), lr=spec.learning_rate, shadows=True)
    return model, torch.optim.AdamW(model.parameters(), lr=spec.learning_rate)


def _precision(kind: Kind, spec: Spec) -> contextlib.AbstractContextManager[Any]:
    if kind.wants_bf16 and spec.bf16:
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _continue(model: Any, tokenizer: Any, kind: Kind, spec: Spec) -> str:
    model.eval()
    inputs = tokenizer(spec.prompt, return_tensors="pt")
    with torch.no_grad(), _precision(kind, spec):
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=spec.new_tokens,
            do_sample=False,
        )
    text: str = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def main(arguments: list[str]) -> int:
    """Entry point; see `child.work`."""
    return work(arguments, lambda text, emit: run(Spec.model_validate_json(text), emit).model_dump_json())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
