"""What a run leaves behind: a model folder that `AutoModelForCausalLM` opens, and the numbers of the run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging

from hasten.base.files import sync_folder


@dataclass(frozen=True)
class Result:
    """The end of a run, finished or interrupted."""

    status: str
    """`finished` or `interrupted`"""
    signal_number: int | None
    step: int
    steps: int
    tokens: int
    loss: float | None
    """of the last step; None if this part of the run made none"""
    eval_loss: float | None
    wall_s: float
    tokens_per_s: float
    """over the steps of this part of the run, the first left out if there are more"""
    peak_rss_bytes: int
    model_folder: Path | None
    adapter_folder: Path | None
    checkpoint: Path | None
    metrics_file: Path
    faults: tuple[str, ...] = ()
    """what could not be written"""

    @property
    def exit_code(self) -> int:
        """0; 1 if something could not be written; 128 + signal if interrupted (130 Ctrl-C, 143 SIGTERM)."""
        if self.signal_number is not None:
            return 128 + self.signal_number
        return 1 if self.faults else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = dataclasses.asdict(self)
        values["signal"] = signal.Signals(self.signal_number).name if self.signal_number is not None else None
        del values["signal_number"]
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def save_model(model: nn.Module, tokenizer: Any, folder: Path) -> Path:
    """Saves a transformers model or a PEFT adapter with its tokenizer; the folder is whole or not there."""

    def write(temporary: Path) -> None:
        with _no_bars():
            model.save_pretrained(temporary)  # type: ignore[operator]
        tokenizer.save_pretrained(temporary)

    return replace_folder(folder, write)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Runs `write` on a temporary folder and gives it the name `folder`, in place of what was there."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def _no_bars() -> Iterator[None]:
    """transformers' own bar stands beside ours and says nothing for one file."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
