"""`hasten demo`: a real model fine-tuned twice on the same real text, plain and with hasten."""

from __future__ import annotations

from pathlib import Path

from hasten.base.screen import Screen
from hasten.bench import report
from hasten.bench.train import Settings, bench_train

MODEL = "smollm2-135m"
BATCH = "2x512"
CONTENDERS = ("eager-bf16", "hasten")
PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """Return'
NEW_TOKENS = 40


def demo(
    out: Path,
    steps: int,
    screen: Screen,
    model: str = MODEL,
    batch: str = BATCH,
    data: str = "python-stdlib",
    tune: bool = False,
) -> tuple[report.BenchReport, Path]:
    """Runs both contenders and writes `out/report.json`.

    Returns:
        The report, of the schema of `hasten bench train`, and where it lies.

    Raises:
        InputError: the model cannot be fetched, or `out` cannot be written (tried before the run).
    """
    path = out / "report.json"
    report.check_writable(path)
    settings = Settings(
        model=model,
        batch=batch,
        steps=steps,
        contenders=CONTENDERS,
        data=data,
        prompt=PROMPT,
        new_tokens=NEW_TOKENS,
        tune=tune,
    )
    result = bench_train(settings, screen)
    report.save(result, path)
    return result, path
