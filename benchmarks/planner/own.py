"""Our own runs: the planner's prediction against `hasten train` on this machine, over small configurations.

`python -m benchmarks.planner.own --cluster FILE [--json FILE]`. FILE is what `hasten calibrate --output`
wrote here. Every run is a whole `hasten train` of a few steps on a random Llama of the given shape; the
fastest step counts, the first two (capture, proof) do not. Every run is predicted twice: by what `hasten
calibrate` measured, and replayed from the profile of one of the runs (`PROFILED`). On a machine that others
use, both sides are noise: say so beside the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hasten.base.files import write_atomically
from hasten.plan import cluster as clusters
from hasten.plan.estimate import estimate
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.model import ModelShape, load
from hasten.plan.replay import Profile, replayed
from hasten.plan.replay import load as load_profile

STEPS = 9
UNCOUNTED = 2


class Run(NamedTuple):
    """One configuration: layers, hidden size, heads, sequences, tokens each, micro batch, recomputing."""

    layers: int
    hidden: int
    heads: int
    batch: int
    sequence: int
    micro_batch: int
    recompute: str


RUNS = (
    Run(4, 256, 4, 4, 128, 4, "none"),
    Run(4, 256, 4, 4, 512, 4, "none"),
    Run(4, 256, 4, 8, 256, 2, "none"),
    Run(4, 256, 4, 4, 512, 4, "full"),
    Run(8, 256, 4, 4, 256, 4, "none"),
    Run(4, 512, 8, 2, 512, 2, "none"),
    Run(4, 512, 8, 4, 512, 2, "none"),
    Run(4, 512, 8, 4, 256, 4, "full"),
    Run(8, 512, 8, 2, 256, 2, "none"),
    Run(8, 512, 8, 1, 1024, 1, "none"),
    Run(4, 1024, 8, 1, 512, 1, "none"),
    Run(4, 1024, 8, 2, 512, 1, "full"),
)


def make_model(run: Run, folder: Path) -> ModelShape:
    """A random Llama of the run's shape with a tokenizer of bytes, written to `folder`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=run.layers,
        hidden_size=run.hidden,
        intermediate_size=3 * run.hidden,
        num_attention_heads=run.heads,
        num_key_value_heads=run.heads,
        vocab_size=4096,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return load(folder)


# The run whose profile the others are replayed from: neither the smallest nor the largest.
PROFILED = RUNS[5]


def measure(run: Run, model: Path, folder: Path) -> tuple[float, Profile]:
    """Seconds of the fastest step (whatever else runs on the machine only adds), and the run's profile."""
    from hasten.train import train
    from hasten.train.config import RunConfig

    text = folder / "text.txt"
    text.write_text(Path(os.__file__).read_text("utf-8") * 4, "utf-8")
    config = RunConfig.model_validate(
        {
            "model": {"id": str(model)},
            "data": {"path": str(text), "cache_folder": str(folder / "cache")},
            "steps": STEPS,
            "precision": "bf16",
            "gradient_checkpointing": run.recompute == "full",
            "batch": {
                "sequence_tokens": run.sequence,
                "batch_tokens": run.batch * run.sequence,
                "micro_batch_tokens": run.micro_batch * run.sequence,
            },
            "output": {"folder": str(folder / "out"), "tensorboard": False},
        }
    )
    train(config, progress=False, profile=folder / "profile.json")
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [float(row["step_s"]) for row in rows if "step_s" in row]
    return min(steps[UNCOUNTED:]), load_profile(folder / "profile.json")


def main() -> None:
    """Prints a table and, with --json, writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cluster = clusters.load(arguments.cluster)
    items: list[tuple[Run, ModelShape, float]] = []
    profile: Profile | None = None
    for run in (PROFILED, *(run for run in RUNS if run != PROFILED)):
        with tempfile.TemporaryDirectory(prefix="hasten-own-") as name:
            folder = Path(name)
            shape = make_model(run, folder / "model")
            measured, seen = measure(run, folder / "model", folder)
        profile = profile or seen
        items.append((run, shape, measured))
    assert profile is not None
    replay = replayed(cluster, profile)
    found: list[dict[str, Any]] = []
    for run, shape, measured in items:
        layout = Layout(
            micro_batch=run.micro_batch,
            accumulation=run.batch // run.micro_batch,
            recompute=run.recompute,  # type: ignore[arg-type]
        )
        job = Job(batch=run.batch, sequence=run.sequence, master="fp32", fused_loss=True)
        by_calibration, by_profile = (
            estimate(shape, which, layout, job).step_s.value for which in (cluster, replay)
        )
        found.append(
            {
                **run._asdict(),
                "measured_s": measured,
                "predicted_s": by_calibration,
                "replayed_s": by_profile,
                "profiled": run == PROFILED,
            }
        )
        print(
            f"{run}: measured {measured:.3f} s, predicted {by_calibration:.3f} s "
            f"({by_calibration / measured:.2f}), replayed {by_profile:.3f} s ({by_profile / measured:.2f})"
        )
    summary: dict[str, float] = {}
    for name in ("predicted_s", "replayed_s"):
        # The profiled run is no test of its own profile.
        rows = [row for row in found if name == "predicted_s" or not row["profiled"]]
        errors = [100 * abs(row[name] / row["measured_s"] - 1) for row in rows]
        summary[name] = round(statistics.mean(errors), 2)
        print(f"{name}: mean error {summary[name]} %, at most {max(errors):.1f} %, {len(rows)} runs")
    if arguments.json:
        document = {"mean_abs_pct": summary, "cluster": cluster.model_dump(), "runs": found}
        write_atomically(arguments.json, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
