"""Everything that the README shows runs: each Python block, and each command line up to its flags."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hasten

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
REAL_MODEL = '"smollm2-135m"'

pytestmark = pytest.mark.e2e


def test_the_readme_begins_with_demo_and_test():
    assert SHELL[:2] == ["make demo", "make test"]
    assert len(PYTHON) >= 4


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.splitlines()[-1][:30])
def test_python_block_runs(block: str, small_model_folder: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    with hasten.fusion_patterns():
        exec(compile(block.replace(REAL_MODEL, repr(str(small_model_folder))), "README.md", "exec"), {})
    if "hasten.report" in block:
        assert len(capsys.readouterr().out) > 100


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("hasten ")])
def test_command_line_has_only_flags_that_exist(line: str):
    words = shlex.split(line)[1:]
    got = subprocess.run(
        [sys.executable, "-m", "hasten", *words, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert got.returncode == 0, got.stderr
    assert "Usage:" in got.stdout
    for word in words:
        if word.endswith(".toml"):
            assert (ROOT / word).is_file()


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("make ")])
def test_make_target_exists(line: str):
    assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
