"""Whole runs: what they leave, and that a resumed one ends with the bits of one that was never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hasten.base.errors import CheckpointError, ConfigError, HastenError, InputError
from hasten.base.files import locked
from hasten.models.tiny import tiny_model
from hasten.train import train
from hasten.train.checkpoint import OVERHEAD_BYTES, load, stored_tensors, verify
from hasten.train.config import RunConfig
from hasten.train.loop import Loop

Settings = Callable[..., RunConfig]


def run(config: RunConfig) -> Any:
    return train(config, progress=False)


def state_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor of a checkpoint, and what of its record must be the same in two runs."""
    found = verify(path)
    tensors = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(found).items()
    }
    load(found, tensors)
    keys = ("step", "consumed_rows", "tokens", "rng", "data_fingerprint", "optimizer_without_state")
    return tensors, {key: found.record[key] for key in keys}


def losses_of(folder: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def assert_same_end(one: Path, other: Path, steps: int = 6) -> None:
    """Weights, Adam, RNG, position, and every loss on the way: equal to the last bit."""
    name = f"step-{steps:08d}"
    tensors, record = state_of(one / "checkpoints" / name)
    other_tensors, other_record = state_of(other / "checkpoints" / name)
    assert record == other_record
    assert tensors.keys() == other_tensors.keys()
    for key, value in tensors.items():
        assert torch.equal(value, other_tensors[key]), key
    assert losses_of(one) == losses_of(other)
    assert [step for step, _, _ in losses_of(one)] == list(range(1, steps + 1))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs that were never stopped, made when first asked for."""
    return {"root": tmp_path_factory.mktemp("reference")}


def never_stopped(
    reference: dict[str, Path], settings: Settings, name: str = "plain", **changes: Any
) -> Path:
    if name not in reference:
        reference[name] = reference["root"] / name
        run(settings(output__folder=str(reference[name]), **changes))
    return reference[name]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Does `action` in the middle of a step."""
    original = Loop.step

    def stepping(self: Loop) -> Any:
        if self.step_number + 1 == step:
            action()
        return original(self)

    monkeypatch.setattr(Loop, "step", stepping)


def test_a_run_leaves_what_it_says(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(
        data__validation_fraction=0.2,
        eval__every_steps=4,
        checkpoint__every_steps=2,
        output__tensorboard=True,
    )
    result = train(config)
    folder = tmp_path / "run"
    assert (result.status, result.exit_code, result.step) == ("finished", 0, 6)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 6]
    assert rows[-1]["eval_loss"] == result.eval_loss
    assert rows[-1]["loss"] == result.loss < rows[0]["loss"]
    assert {"lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "rss_bytes", "peak_rss_bytes"} <= rows[
        0
    ].keys()
    assert list((folder / "tensorboard").iterdir())
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    said = capsys.readouterr().err
    assert "12 documents" in said
    assert said.count("documents are longer than 32 tokens") == 1
    assert "step 6/6" in said
    assert not list(folder.glob(".*"))


def test_result_opens_as_an_ordinary_folder(settings: Settings, tmp_path: Path, text_folder: Path) -> None:
    result = run(settings())
    model = AutoModelForCausalLM.from_pretrained(result.model_folder)
    tokenizer = AutoTokenizer.from_pretrained(result.model_folder)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tokenizer.decode(tokenizer("alpha beta")["input_ids"]) == "alpha beta"
    tensors, _ = state_of(result.checkpoint)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(f"model.{name}" for name in names) == sorted(n for n in tensors if n.startswith("model."))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[f"model.{name}"])
    assert not any("lm_head" in name for name in tensors)


@pytest.mark.parametrize("step", [1, 3, 6])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed_is_bit_equal(
    settings: Settings,
    reference: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: int,
    number: signal.Signals,
) -> None:
    whole = never_stopped(reference, settings)
    config = settings()
    with monkeypatch.context() as patch:
        stop_at(patch, step, lambda: os.kill(os.getpid(), number))
        stopped = train(config)
    assert (stopped.status, stopped.exit_code, stopped.step) == ("interrupted", 128 + number, step)
    assert stopped.model_folder is None
    assert f"stopped after step {step}; the same command continues" in capsys.readouterr().err
    again = run(config)
    assert (again.status, again.step) == ("finished", 6)
    assert_same_end(whole, config.output.folder)


def test_resumed_several_times_with_lora_dropout(
    settings: Settings, reference: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"lora__r": 4, "lora__dropout": 0.3, "precision": "bf16"}
    whole = never_stopped(reference, settings, "lora", **changes)
    config = settings(**changes)
    for step in (2, 3, 5):
        with monkeypatch.context() as patch:
            stop_at(patch, step, lambda: os.kill(os.getpid(), signal.SIGINT))
            run(config)
    run(config)
    assert_same_end(whole, config.output.folder)
    tensors, _ = state_of(whole / "checkpoints" / "step-00000006")
    assert all("lora_" in name for name in tensors)


KILLED = """
    import json, os, signal, sys
    from hasten.train import checkpoint, load_config, run

    config = load_config(None, json.loads(sys.argv[1]))
    folder = config.checkpoint_folder

    def die_in(step, home, name, when, after):
        original = getattr(home, name)

        def call(*args, **kwargs):
            done = original(*args, **kwargs) if after else None
            if list(folder.glob(f"step-{step:08d}*")) and when in str(args[0]):
                os.kill(os.getpid(), signal.SIGKILL)
            return done if after else original(*args, **kwargs)

        setattr(home, name, call)

    deaths = [
        (2, checkpoint.dcp, "save", "model.", True),
        (4, checkpoint, "sha256_of", "distcp", False),
        (5, checkpoint, "write_atomically", "COMMIT", False),
    ]
    for death in deaths:
        child = os.fork()
        if not child:
            die_in(*death)
            run.train(config, progress=False)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, *sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.e2e
def test_killed_while_writing_a_checkpoint(settings: Settings, reference: dict[str, Path]) -> None:
    """SIGKILL after the tensors, before the hashes, before the commit mark; the run goes on from the last."""
    whole = never_stopped(reference, settings)
    config = settings(checkpoint__every_steps=1)
    flat = {key: value for key, value in flattened(config.as_json()).items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), json.dumps(flat)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.splitlines() == [
        "-9 step-00000001 step-00000002.tmp",
        "-9 step-00000002 step-00000003 step-00000004.tmp",
        "-9 step-00000003 step-00000004 step-00000005",
    ], done.stderr
    with pytest.raises(CheckpointError, match="COMMIT is missing"):
        verify(config.checkpoint_folder / "step-00000005")
    result = run(config)
    assert (result.status, result.step) == ("finished", 6)
    assert_same_end(whole, config.output.folder)


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        )
    return flat


def test_damaged_checkpoint_falls_back_and_still_ends_bit_equal(
    settings: Settings,
    reference: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = never_stopped(reference, settings)
    config = settings(checkpoint__every_steps=2)
    with monkeypatch.context() as patch:
        stop_at(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        stopped = run(config)
    file = stopped.checkpoint / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])
    run(config)
    assert "step-00000004 is damaged: __0_0.distcp has 1000 bytes" in capsys.readouterr().err
    assert_same_end(whole, config.output.folder)


def test_resume_from_a_path_takes_that_one(settings: Settings, reference: dict[str, Path]) -> None:
    whole = never_stopped(reference, settings)
    config = settings(checkpoint__every_steps=2, checkpoint__keep_last=9)
    run(config)
    second = config.checkpoint_folder / "step-00000002"
    again = run(settings(checkpoint__resume=str(second)))
    assert again.step == 6
    assert (config.checkpoint_folder / "step-00000006.aside").is_dir()
    assert_same_end(whole, config.output.folder)


def test_a_finished_run_is_not_done_again(settings: Settings) -> None:
    run(settings())
    again = run(settings())
    assert (again.status, again.step, again.loss) == ("finished", 6, None)
    longer = run(settings(steps=8))
    assert longer.step == 8
    with pytest.raises(InputError, match="resume = 'none'"):
        run(settings(checkpoint__resume="none"))


def test_other_settings_or_text_are_refused(settings: Settings, tmp_path: Path, text_folder: Path) -> None:
    run(settings())
    with pytest.raises(ConfigError, match=r"seed was 7, is 8"):
        run(settings(seed=8))
    with pytest.raises(
        ConfigError, match=r"batch\.micro_batch_tokens was 64, is 128; optimizer\.lr was 0\.01"
    ):
        run(settings(batch__micro_batch_tokens=128, optimizer__lr=0.02))
    other = shutil.copytree(text_folder, tmp_path / "other")
    run(settings(data__path=str(other)))
    (other / "text00.txt").write_text("something else")
    with pytest.raises(ConfigError, match="written on other text"):
        run(settings(data__path=str(other)))


def test_full_disk_costs_a_checkpoint_and_not_the_run(
    settings: Settings,
    reference: dict[str, Path],
    small_disk: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = never_stopped(reference, settings) / "checkpoints" / "step-00000006"
    disk = small_disk(OVERHEAD_BYTES + int(1.5 * sum(file.stat().st_size for file in one.iterdir())))
    result = run(settings(checkpoint__every_steps=2, checkpoint__keep_last=9, checkpoint__folder=str(disk)))
    assert (result.status, result.step, result.exit_code) == ("finished", 6, 1)
    assert "disk is full: the checkpoint of step 6" in result.faults[0]
    assert capsys.readouterr().err.count("disk is full") == 2
    assert [entry.name for entry in disk.iterdir()] == ["step-00000002"]
    assert verify(disk / "step-00000002").step == 2
    AutoModelForCausalLM.from_pretrained(result.model_folder)


def test_full_disk_for_everything(settings: Settings, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(100_000)
    result = run(settings(output__folder=str(disk / "run"), checkpoint__every_steps=5))
    assert (result.status, result.step, result.exit_code) == ("finished", 6, 1)
    assert result.model_folder is None
    assert len(result.faults) == 2
    assert not list((disk / "run").glob("model*"))


def test_rows_of_a_full_disk_are_written_later(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/full refuses every write; the file is put back before the fourth step."""
    from hasten.train.metrics import Metrics

    original = Metrics.write

    def write(self: Metrics, row: dict[str, Any]) -> None:
        real = self.file
        self.file = Path("/dev/full") if row["step"] < 4 else real
        try:
            original(self, row)
        finally:
            self.file = real

    monkeypatch.setattr(Metrics, "write", write)
    config = settings()
    assert run(config).exit_code == 0
    assert [step for step, _, _ in losses_of(config.output.folder)] == [1, 2, 3, 4, 5, 6]
    assert "No space left on device" in capsys.readouterr().err


def test_loss_that_is_not_finite_keeps_what_was_reached(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.train import loop as module

    original = module.loss_sum
    calls: list[int] = []

    def poisoned(model: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        return original(model, batch) * (float("nan") if len(calls) > 6 else 1.0)

    monkeypatch.setattr(module, "loss_sum", poisoned)
    config = settings()
    with pytest.raises(HastenError, match="step 4: the loss is nan"):
        run(config)
    assert verify(config.checkpoint_folder / "step-00000003").step == 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_writes_an_adapter_and_the_merged_model(
    settings: Settings, model_folder: Path, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    result = run(settings(lora__r=4, lora__target_modules=["q_proj", "v_proj"], lora__merge=True))
    adapted = AutoPeftModelForCausalLM.from_pretrained(result.adapter_folder).eval()
    merged = AutoModelForCausalLM.from_pretrained(result.model_folder).eval()
    base = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours, theirs, plain = (model(input_ids=ids).logits for model in (adapted, merged, base))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours, plain, atol=1e-2)
    with pytest.raises(ConfigError, match=r"no module is called 'q_prj'.*did you mean 'q_proj'"):
        run(settings(output__folder=str(tmp_path / "other"), lora__target_modules=["q_prj"]))


def test_one_document_a_row_for_a_model_that_cannot_pack(
    settings: Settings, tmp_path: Path, tokenizer: Any
) -> None:
    folder = tmp_path / "bloom"
    tiny_model("bloom", vocab_size=258).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"data\.packing = false"):
        run(settings(model__id=str(folder)))
    result = run(settings(model__id=str(folder), data__packing=False))
    assert result.status == "finished"
    assert result.tokens < 6 * 128


def test_gradient_checkpointing_gives_the_same_losses(
    settings: Settings, model_folder: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "nodrop"
    tiny_model("llama", vocab_size=258).save_pretrained(plain)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(plain)
    folders = [tmp_path / "without", tmp_path / "with"]
    for folder, on in zip(folders, (False, True), strict=True):
        run(settings(model__id=str(plain), output__folder=str(folder), gradient_checkpointing=on, steps=3))
    without, checkpointed = (torch.tensor(losses_of(folder)) for folder in folders)
    torch.testing.assert_close(without, checkpointed, rtol=1e-5, atol=1e-6)


# Dynamo looks at .grad of the layer's input, which is not a leaf; torch warns of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_an_optimized_run_has_the_losses_of_a_plain_one(
    settings: Settings, tmp_path: Path, tokenizer: Any
) -> None:
    plain = tmp_path / "nodrop"
    tiny_model("llama", vocab_size=258, tie_word_embeddings=True).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    runs = []
    for optimize in (False, True):
        folder = tmp_path / f"run{optimize}"
        changes = {
            "optimize": optimize,
            "optimizer__lr": 1e-3,
            "eval__every_steps": 3,
        }
        run(
            settings(
                model__id=str(plain), output__folder=str(folder), data__validation_fraction=0.1, **changes
            )
        )
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        runs.append([row[key] for row in rows for key in ("loss", "eval_loss") if key in row])
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


# Dynamo looks at .grad of the layer's input, which is not a leaf; torch warns of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_an_optimized_run_resumes_bit_equal(
    settings: Settings, reference: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"optimize": True, "precision": "bf16"}
    whole = never_stopped(reference, settings, "optimized", **changes)
    config = settings(**changes)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        run(config)
    run(config)
    assert_same_end(whole, config.output.folder)


def test_rows_longer_than_the_context_are_refused(settings: Settings) -> None:
    changes = {f"batch__{name}_tokens": 4096 for name in ("sequence", "batch", "micro_batch")}
    with pytest.raises(ConfigError, match=r"sequence_tokens = 4096.*context of 2048.*valid value is 2048"):
        run(settings(**changes))


def test_output_that_is_a_file(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"output\.folder.*is a file, not a folder"):
        run(settings(output__folder=str(tmp_path / "file")))
    with pytest.raises(InputError, match=r"output\.folder.*the name is too long"):
        run(settings(output__folder=str(tmp_path / ("long" * 99))))


def test_two_runs_in_one_folder_are_refused(settings: Settings) -> None:
    config = settings(steps=2)
    config.output.folder.mkdir()
    with (
        locked(config.output.folder, "a test"),
        pytest.raises(InputError, match="in use by another training run"),
    ):
        run(config)
    assert run(config).status == "finished"


def test_a_model_that_is_not_causal_is_refused(settings: Settings, tmp_path: Path, tokenizer: Any) -> None:
    for family in ("bert", "modernbert"):
        folder = tmp_path / family
        tiny_model(family, vocab_size=258).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        with pytest.raises(ConfigError, match="lets a token see those after it"):
            run(settings(model__id=str(folder), data__packing=False))


def test_text_with_nothing_to_predict_is_refused(settings: Settings) -> None:
    with pytest.raises(InputError, match="nothing to learn"):
        run(settings(data__max_tokens=1))


def test_the_environment_does_not_change_the_precision_of_a_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(steps=2, optimize=True, output__tensorboard=False)
    plain = run(config)
    monkeypatch.setenv("HASTEN_PRECISION", "bf16")
    other = config.model_copy(
        update={"output": config.output.model_copy(update={"folder": config.output.folder / "b"})}
    )
    assert run(other).loss == plain.loss
    monkeypatch.setenv("HASTEN_LEVEL", "high")
    with pytest.raises(ConfigError, match="HASTEN_LEVEL"):
        run(other)
