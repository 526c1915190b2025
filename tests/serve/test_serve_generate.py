"""`hasten generate`, and opening from disk: the same answer, and no model code the second time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.ops import native

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(native.state().level is None, reason=native.state().reason),
]


def run(
    arguments: list[str], cache: Path, expected: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HASTEN_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environ |= variables
    done = subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == expected, done.stderr
    return done


def generate(folder: Path, cache: Path, *more: str, **variables: str) -> dict[str, Any]:
    words = [
        "-m",
        "hasten",
        "generate",
        str(folder),
        "def f(x):",
        "--max-tokens",
        "12",
        "--ignore-eos",
        "--json",
    ]
    return dict(json.loads(run([*words, *more], cache, **variables).stdout))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_the_second_start_is_from_disk_and_says_the_same(small_model_folder: Path, cache: Path) -> None:
    first, second = (generate(small_model_folder, cache) for _ in range(2))
    assert (first["about"]["from_disk"], second["about"]["from_disk"]) == (False, True)
    assert first["tokens"] == second["tokens"]
    assert len(first["tokens"]) == 12
    assert second["about"]["weights"] == "bfloat16"
    assert second["decode_tokens_per_s"] > 0


ANSWER = """
import sys
from hasten.serve.open import open_engine
from hasten.serve.params import SamplingParams
from hasten.serve.stream import Request
engine, served = open_engine({folder!r})
params = [
    SamplingParams(max_tokens=5, temperature=0),
    SamplingParams(
        max_tokens=5, seed=1, top_k=20, top_p=0.9, repetition_penalty=1.1, logprobs=2, prompt_logprobs=2,
        logit_bias={{3: 1.0}},
    ),
]
tokens = [engine.submit(Request(prompt="def f(x):", params=one)).collect()[0].tokens for one in params]
engine.stop()
print(served.about.from_disk, sorted({{"torch", "transformers"}} & sys.modules.keys()))
print(tokens)
"""


def test_a_program_from_disk_runs_without_torch(small_model_folder: Path, cache: Path) -> None:
    generate(small_model_folder, cache)
    code = ANSWER.format(folder=str(small_model_folder))
    lean = run(["-c", code], cache, OMP_NUM_THREADS="2").stdout.splitlines()
    assert lean[0] == ("True ['torch']" if native.state().amx else "True []")
    heavy = run(["-c", f"import torch\n{code}"], cache, OMP_NUM_THREADS="2").stdout.splitlines()
    assert heavy == ["True ['torch']", lean[1]]
    # torch is loaded behind it as well: one OpenMP serves both.
    late = f"{code}\nimport torch\nx = torch.randn(500, 500)\nx @ x\n" + (
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({m for m in maps if 'libgomp' in m or 'libomp' in m or 'libiomp' in m}))"
    )
    if Path("/proc/self/maps").exists():
        assert run(["-c", late], cache, OMP_NUM_THREADS="2").stdout.splitlines()[1:] == [lean[1], "1"]


def test_without_kernels_the_ordinary_model_answers(small_model_folder: Path, cache: Path) -> None:
    options = ("--weights", "float32", "--cache", "float32")
    expected = generate(small_model_folder, cache, *options)
    found = generate(small_model_folder, cache, *options, HASTEN_NATIVE="0")
    assert found["about"]["ordinary"].endswith("there are none: HASTEN_NATIVE=0")
    assert found["about"]["weights"] == "the model's own"
    assert len(found["tokens"]) == len(expected["tokens"])


def test_fp32_says_what_transformers_says(small_model_folder: Path, cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = generate(small_model_folder, cache, "--weights", "float32", "--cache", "float32")
    tokens = AutoTokenizer.from_pretrained(small_model_folder)("def f(x):", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(small_model_folder).eval()
    with torch.no_grad():
        expected = model.generate(
            tokens, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert found["tokens"] == expected[0, tokens.shape[1] :].tolist()


def test_other_weights_are_held_to_the_models_own(small_model_folder: Path, cache: Path) -> None:
    found = generate(small_model_folder, cache, "--weights", "int8", "--check")
    gate = found["about"]["gate"]
    assert 0.99 < gate["perplexity_ratio"] < 1.05
    assert gate["mean_kl"] < 0.01
    refused = ["-m", "hasten", "generate", str(small_model_folder), "x", "--weights", "int4", "--check"]
    said = run([*refused, "--max-perplexity-ratio", "1"], cache, 2).stderr
    assert "perplexity" in said
    assert "--max-perplexity-ratio" in said


def test_weights_that_learnt_are_kept(small_model_folder: Path, cache: Path) -> None:
    first, second = (generate(small_model_folder, cache, "--weights", "4.5:3") for _ in range(2))
    assert (first["about"]["from_disk"], second["about"]["from_disk"]) == (False, True)
    assert first["tokens"] == second["tokens"]
    learnt = second["about"]["note"]["distilled"]
    assert learnt["steps"] == 3
    assert learnt["kl_before"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["MODEL", ""], "the prompt is empty"),
        (["MODEL", "x", "--weights", "int7"], "int4"),
        (["MODEL", "x", "--weights", "int4:many"], "whole number from 1"),
        (["MODEL", "x", "--weights", "0.5"], "this model takes at least"),
        (["MODEL", "x", "--context", "100000"], "positions for"),
        (["MODEL", "x", "--system", "Be brief."], "chat template"),
        (["/no/such/model", "x"], "no such file or folder"),
    ],
)
def test_mistakes_are_one_message(
    arguments: list[str], said: str, small_model_folder: Path, cache: Path
) -> None:
    words = [str(small_model_folder) if word == "MODEL" else word for word in arguments]
    done = run(["-m", "hasten", "generate", *words], cache, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
