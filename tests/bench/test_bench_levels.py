"""One bench at several instruction levels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_bench_train import OUTCOME, QUIET

from hasten.base.errors import ConfigError
from hasten.base.facts import ISA_LEVELS, detect
from hasten.bench import levels, train
from hasten.bench.report import save

ROOT = Path(__file__).parents[2]


def test_every_level_has_its_limits():
    assert tuple(levels.ENVIRONMENT) == ISA_LEVELS
    assert levels.environment("avx2") == {
        "HASTEN_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }


def test_levels_are_checked_against_the_machine():
    facts = detect({"isa_available": "avx2"})
    assert levels.parse_levels("avx2, GENERIC", facts) == ("avx2", "generic")
    for text, message in (
        ("avx512", "level 'avx512': no: "),
        ("avx3", "level 'avx3': unknown; .* did you mean 'avx2'"),
        ("avx2,avx2", "name each level once"),
        (" ", "name each level once"),
    ):
        with pytest.raises(ConfigError, match=message):
            levels.parse_levels(text, facts)


def test_below_avx512_there_is_no_bf16():
    facts = detect({"bf16_in_hardware": True})
    assert levels.has_bf16(None, facts)[0]
    assert levels.has_bf16("avx512", facts)[0]
    assert levels.has_bf16("avx2", facts) == (False, "level avx2 has no bf16")
    without = detect({"bf16_in_hardware": False})
    assert levels.has_bf16("avx512", without) == (False, "this processor has no bf16 in hardware")


def test_each_contender_runs_at_each_level(
    monkeypatch: pytest.MonkeyPatch, fast_limits: None, tmp_path: Path
):
    ran = []

    def fake(spec, folder, title, screen, environment):
        ran.append((spec.contender, spec.bf16, environment))
        return OUTCOME

    monkeypatch.setattr(train, "run_contender", fake)
    settings = train.Settings("tiny:llama", "1x16", 2, contenders=("eager-bf16", "hasten"))
    report = train.bench_levels(settings, ["generic", "avx512"], QUIET)
    assert list(report.reports) == ["generic", "avx512"]
    bf16 = detect().bf16_in_hardware.value
    assert ran == [
        (name, bf16 and level == "avx512", levels.environment(level))
        for level in ("generic", "avx512")
        for name in settings.contenders
    ]
    generic = report.reports["generic"]
    assert generic.level == "generic"
    assert generic.contenders["hasten"].dtype == "float32"
    assert generic.contenders["hasten"].note in (
        "fp32: level generic has no bf16",
        "fp32: this processor has no bf16 in hardware",
    )
    save(report, tmp_path / "levels.json")
    raw = json.loads((tmp_path / "levels.json").read_text())
    assert raw["schema"] == "hasten.bench.levels/1"
    assert levels.LevelsReport.model_validate(raw) == report
    text = (ROOT / "docs/formats/report.md").read_text()
    for name, field in levels.LevelsReport.model_fields.items():
        assert f"`{field.alias or name}`" in text


@pytest.mark.skipif(detect().isa_available.value == "generic", reason="there is no level to leave out")
def test_torch_obeys_the_limit():
    """The variables are those that this version of torch reads."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    import os

    got = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | levels.environment("generic"),
    )
    assert got.stdout.strip() == "DEFAULT"
