"""A whole run: set up, continue from a checkpoint, step, evaluate, write, stop when asked to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hasten.base.config import make_config
from hasten.base.errors import CheckpointError, ConfigError, HastenError
from hasten.base.facts import detect
from hasten.base.files import locked, make_folder
from hasten.base.screen import Screen, spell_bytes
from hasten.models import open_model
from hasten.train import checkpoint as checkpoints
from hasten.train import state
from hasten.train.config import RunConfig
from hasten.train.data import load_tokens
from hasten.train.loop import Loop, StepNumbers
from hasten.train.metrics import METRICS_FILE, Metrics, peak_rss_bytes, rss_bytes
from hasten.train.optimizer import Stepper
from hasten.train.prepare import adapt, check_model, optimized, rows_of, write_result
from hasten.train.recorder import Recorder
from hasten.train.result import Result
from hasten.train.stop import Interrupted, StopSignals
from hasten.train.text import find_source
from hasten.train.tuning import tune_once

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def train(
    config: RunConfig, *, progress: bool = True, tune: bool = False, profile: Path | None = None
) -> Result:
    """Runs, or continues, the training that `config` describes.

    A run that is interrupted by Ctrl-C or SIGTERM returns with `status == "interrupted"` after writing a
    checkpoint; before the first step it returns at once, and what an earlier part wrote is as it was.
    Continued from it, it ends with the same bits as a run that was never stopped (on the same machine, with
    the same number of threads).

    `tune`: measure which native kernels lose to torch, if this machine has no table of that yet.
    `profile`: also measure the operators of one step and write them there, for `hasten plan --profile`.

    Raises:
        UserError: a setting or an input is wrong; found before the model is opened where that is possible.
        CheckpointError: the checkpoint asked for is damaged, or does not fit the model.
        HastenError: the loss is not finite.
    """
    started_s = time.perf_counter()
    screen = Screen(enabled=progress)
    precision = detect().default_dtype().value if config.precision == "auto" else config.precision
    find_source(config.data)
    if config.optimize:
        make_config()  # A wrong HASTEN_* variable is found here and not after the model is opened.
    make_folder(config.output.folder, f"output.folder = {str(config.output.folder)!r} cannot be used")
    with locked(config.output.folder, "another training run"):
        start = checkpoints.find(config.checkpoint_folder, config.checkpoint.resume, screen)
        if start is not None:
            state.check_settings(config, precision, start)
        try:
            return _train(config, precision, screen, started_s, start, tune, profile)
        except Interrupted as stopped:
            screen.note(f"{stopped}: stopped before a step was made; the same command starts again")
            return _not_begun(config, start, stopped, started_s)


def _train(
    config: RunConfig,
    precision: str,
    screen: Screen,
    started_s: float,
    start: checkpoints.Checkpoint | None,
    tune: bool,
    profile: Path | None,
) -> Result:
    """`train` once its settings are checked and its output folder is its own."""
    with StopSignals(screen) as stop:
        state.seed_all(config.seed)
        model, tokenizer = open_model(config.model.id, dtype=DTYPES[config.model.dtype])
        check_model(config, model, tokenizer)
        done = start.step if start is not None else 0
        recorder = Recorder(config, precision, model, done, profile) if profile is not None else None
        stream = load_tokens(config.data, tokenizer, screen=screen)
        if start is not None and start.record["data_fingerprint"] != stream.fingerprint:
            raise ConfigError(
                f"{start.path} was written on other text than data.path = {config.data.path!r} holds now; "
                "give the same text, or choose another output.folder to start anew"
            )
        rows, held_out = rows_of(config, tokenizer, stream, screen)
        model = adapt(config, model)
        if tune and config.optimize:
            tune_once(screen)
        with optimized(config, model):
            bounded = make_config().memory is not None
            stepper = Stepper(model, config.optimizer, fused=config.optimize, shadows=not bounded)
            loop = Loop(model, stepper, rows, held_out, config, precision)
            state.seed_all(config.seed)
            if start is not None:
                state.restore(loop, start)
                screen.note(f"continuing after step {start.step} from {start.path}")
            # What is written from here on is written whole before a signal ends the run.
            stop.defer()
            part = _Part(config, precision, loop, stream.fingerprint, stop, screen, start, recorder)
            part.run()
            if recorder is not None:
                try:
                    screen.note(recorder.write())
                except (HastenError, OSError) as error:
                    part.fault(f"{recorder.file} ({error})")
        model_folder: Path | None = None
        adapter_folder: Path | None = None
        if stop.received is None:
            try:
                model_folder, adapter_folder = write_result(config, model, tokenizer)
                screen.note(part.summary())
                screen.note(f"result: {adapter_folder or model_folder}")
            except (OSError, SafetensorError) as error:
                part.fault(f"the result in {config.output.folder} ({error})")
    if stop.received is not None:
        screen.note(part.how_to_continue())
    return Result(
        status="finished" if stop.received is None else "interrupted",
        signal_number=stop.received,
        step=loop.step_number,
        steps=config.steps,
        tokens=loop.tokens,
        loss=part.last_row["loss"] if part.last_row else None,
        eval_loss=part.eval_loss,
        wall_s=time.perf_counter() - started_s,
        tokens_per_s=part.tokens_per_s(),
        peak_rss_bytes=peak_rss_bytes(),
        model_folder=model_folder,
        adapter_folder=adapter_folder,
        checkpoint=part.checkpoint,
        metrics_file=part.metrics.file,
        faults=tuple(part.all_faults()),
    )


def _not_begun(
    config: RunConfig, start: checkpoints.Checkpoint | None, stopped: Interrupted, started_s: float
) -> Result:
    """The result of a run that was stopped while it read the model and the text."""
    return Result(
        status="interrupted",
        signal_number=stopped.number,
        step=start.step if start is not None else 0,
        steps=config.steps,
        tokens=int(start.record["tokens"]) if start is not None else 0,
        loss=None,
        eval_loss=None,
        wall_s=time.perf_counter() - started_s,
        tokens_per_s=0.0,
        peak_rss_bytes=peak_rss_bytes(),
        model_folder=None,
        adapter_folder=None,
        checkpoint=start.path if start is not None else None,
        metrics_file=config.output.folder / METRICS_FILE,
    )


@dataclass
class _Part:
    """The part of a run between two starts of the process."""

    config: RunConfig
    precision: str
    loop: Loop
    fingerprint: str
    stop: StopSignals
    screen: Screen
    start: checkpoints.Checkpoint | None
    recorder: Recorder | None = None
    speeds: list[tuple[int, float]] = field(default_factory=list)
    last_row: dict[str, Any] | None = None
    eval_loss: float | None = None
    checkpoint: Path | None = None
    checkpoint_fault: str | None = None
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checkpoint = self.start.path if self.start is not None else None
        self._saved_step = self.loop.step_number
        self.metrics = Metrics(
            self.config.output.folder,
            after_step=self.loop.step_number,
            tensorboard=self.config.output.tensorboard,
            screen=self.screen,
        )

    def run(self) -> None:
        """Steps until the end, a signal, or a loss that is not finite; whatever was reached is written."""
        try:
            with self.screen.bar("train", self.config.steps) as bar:
                while self.loop.step_number < self.config.steps and self.stop.received is None:
                    numbers = self.recorder.step(self.loop) if self.recorder else self.loop.step()
                    row = self._row(numbers)
                    self.metrics.write(row)
                    last = numbers.step == self.config.steps
                    bar.update(numbers.step, _detail(row, self.config.steps), line=last or numbers.step == 1)
                    if not last and _due(numbers.step, self.config.checkpoint.every_steps):
                        self._save()
        except HastenError:
            self._save()
            raise
        finally:
            self.metrics.close()
        self._save()
        if self.metrics.unwritten:
            self.fault(f"{self.metrics.unwritten} rows of {self.metrics.file}")

    def fault(self, what: str) -> None:
        """Notes what could not be written."""
        self.screen.warn(f"not written: {what}")
        self.faults.append(what)

    def all_faults(self) -> list[str]:
        """What is not on the disk although it should be."""
        return [*self.faults, *([self.checkpoint_fault] if self.checkpoint_fault else [])]

    def tokens_per_s(self) -> float:
        """Over the steps of this part; the first pays for capture and first allocations and is left out."""
        steps = self.speeds[1:] or self.speeds
        seconds = sum(step_s for _, step_s in steps)
        return sum(tokens for tokens, _ in steps) / seconds if seconds else 0.0

    def summary(self) -> str:
        """What a finished run prints last, where its bar was."""
        row = self.last_row
        if row is None:
            return f"all {self.config.steps} steps were done before"
        return (
            f"step {row['step']}/{self.config.steps}  loss {row['loss']:.4f}{_evaluated(row)}  "
            f"{self.tokens_per_s():,.0f} tokens/s  peak memory {spell_bytes(row['peak_rss_bytes'])}"
        )

    def how_to_continue(self) -> str:
        """The last message of an interrupted run."""
        if self.checkpoint_fault:
            return f"stopped after step {self.loop.step_number}; {self.checkpoint_fault}"
        if self.checkpoint is None:
            return "stopped before the first step; there is nothing to continue"
        return (
            f"stopped after step {self.loop.step_number}; the same command continues, or: "
            f"--resume {self.checkpoint}"
        )

    def _row(self, numbers: StepNumbers) -> dict[str, Any]:
        self.speeds.append((numbers.tokens, numbers.step_s))
        row: dict[str, Any] = {
            "step": numbers.step,
            "loss": numbers.loss,
            "lr": numbers.lr,
            "grad_norm": numbers.grad_norm,
            "tokens": self.loop.tokens,
            "tokens_per_s": numbers.tokens / numbers.step_s,
            "step_s": numbers.step_s,
            "rss_bytes": rss_bytes(),
            "peak_rss_bytes": peak_rss_bytes(),
        }
        every = self.config.eval.every_steps
        if every and (_due(numbers.step, every) or numbers.step == self.config.steps):
            self.eval_loss = self.loop.evaluate()
            row["eval_loss"] = self.eval_loss
        self.last_row = row
        return row

    def _save(self) -> None:
        """Writes a checkpoint if there was a step since the last; a fault is said and does not end the it."""
        if self.loop.step_number == self._saved_step:
            return
        folder = self.config.checkpoint_folder
        settings = state.fixed_settings(self.config, self.precision)
        record = state.record(self.loop, settings, self.fingerprint, self.last_row)
        try:
            self.checkpoint = checkpoints.save(
                folder, self.loop.step_number, state.tensors(self.loop), record
            )
        except CheckpointError as error:
            self.checkpoint_fault = str(error)
            goes_on = self.loop.step_number < self.config.steps and self.stop.received is None
            self.screen.warn(f"{error}{'; the run goes on' if goes_on else ''}")
            return
        self.checkpoint_fault = None
        self._saved_step = self.loop.step_number
        checkpoints.rotate(folder, self.config.checkpoint.keep_last)


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _detail(row: dict[str, Any], steps: int) -> str:
    return (
        f"step {row['step']}/{steps}  loss {row['loss']:.4f}{_evaluated(row)}  lr {row['lr']:.2e}  "
        f"{row['tokens_per_s']:,.0f} tokens/s  memory {spell_bytes(row['rss_bytes'])} "
        f"(peak {spell_bytes(row['peak_rss_bytes'])})"
    )


def _evaluated(row: dict[str, Any]) -> str:
    return f"  eval {row['eval_loss']:.4f}" if row.get("eval_loss") is not None else ""
