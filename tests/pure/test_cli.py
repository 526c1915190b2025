"""The command line: what it lists, how fast, its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import hasten

COMMANDS = (
    ["demo"], ["train"], ["generate"], ["serve"], ["plan"], ["calibrate"], ["bench"], ["bench", "train"],
    ["bench", "generate"], ["bench", "serve"], ["bench", "ops"], ["doctor"],
)  # fmt: skip


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hasten", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# One process asks for every help text, so that its imports show what help costs.
HELPS = """
import json, sys
from typer.testing import CliRunner
from hasten.__main__ import app
texts = {}
for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0, (command, result.output)
    texts[" ".join(command)] = result.output
print(json.dumps([texts, sorted({"torch", "transformers", "numpy"} & set(sys.modules))]))
"""


@pytest.fixture(scope="module")
def helps() -> tuple[dict[str, str], list[str]]:
    """(help text by command, heavy modules that were imported on the way)."""
    arguments = [sys.executable, "-c", HELPS, json.dumps([[], *COMMANDS])]
    got = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert got.returncode == 0, got.stderr
    texts, heavy = json.loads(got.stdout)
    return texts, heavy


def test_help_lists_every_command(helps: tuple[dict[str, str], list[str]]):
    for command in COMMANDS:
        assert re.search(rf"^\W*{command[0]}\s", helps[0][""], re.MULTILINE), command


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_each_command_has_an_example(command: list[str], helps: tuple[dict[str, str], list[str]]):
    text = helps[0][" ".join(command)]
    assert f"hasten {command[0]}" in text.split("xample", 1)[1]


def test_help_imports_no_torch(helps: tuple[dict[str, str], list[str]]):
    assert helps[1] == []


def test_version():
    got = _run("--version")
    assert (got.returncode, got.stdout.strip()) == (0, f"hasten {hasten.__version__}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Did you mean 'train'"),
        (["bench", "trian"], "Did you mean 'train'"),
        (["bench", "train", "--step", "3"], "--step"),
        (["demo", "--steps", "0"], "--steps"),
        (["bench", "train", "--contenders", "hastn"], "did you mean 'hasten'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_exits_with_2_and_says_what_is_near(arguments: list[str], message: str):
    got = _run(*arguments)
    assert got.returncode == 2
    assert message in got.stderr
    assert "Traceback" not in got.stderr


def test_a_user_error_is_one_message_on_stderr():
    got = _run("bench", "train", "--model", "tiny:llama", "--batch", "2by3")
    assert got.returncode == 2
    assert got.stdout == ""
    assert got.stderr.splitlines()[-1].startswith("hasten: batch = '2by3'")


def test_without_a_command_the_list_is_shown():
    got = _run()
    assert "bench" in got.stdout + got.stderr
    assert got.returncode == 2


def test_doctor_prints_json():
    got = _run("doctor", "--json")
    assert got.returncode == 0, got.stderr
    assert isinstance(json.loads(got.stdout), dict)
