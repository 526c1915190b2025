"""`hasten bench quality`: formats by name, and a small trained-like model held against its own formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hasten.base.errors import ConfigError, InputError
from hasten.base.screen import Screen
from hasten.bench import quality
from hasten.bench.command import bench


def test_formats_by_name() -> None:
    got = quality.parse_formats("bfloat16, stored+int8,4.5")
    assert got == (("bfloat16", "bfloat16"), ("stored", "int8"), ("4.5", "bfloat16"))
    assert [str(form) for form in got] == ["bfloat16", "stored+int8", "4.5"]
    assert [str(form) for form in quality.parse_formats(None)] == list(quality.FORMATS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bfloat61", "bfloat61.*bfloat16"),
        ("auto", "auto.*bfloat16"),
        ("bfloat16+int9", "int9.*int8"),
        ("-4", "'-4'"),
        ("", "at least one"),
        ("int8,int8+bfloat16", "name each once"),
    ],
)
def test_a_wrong_format_is_one_message(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        quality.parse_formats(text)


def test_random_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="random weights predict nothing"):
        quality.bench_quality("tiny:llama", quality.parse_formats("bfloat16"), Screen())


def test_fewer_bits_are_fewer_bytes_and_further_away(small_model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    arguments = ["quality", "--model", str(small_model_folder), "--json", str(path)]
    formats = ["--formats", "float32+float32,bfloat16,int8,int8+int8,int4"]
    result = CliRunner().invoke(bench, [*arguments, *formats], env={"HASTEN_CACHE_DIR": str(tmp_path)})
    assert result.exit_code == 0, result.output
    report = quality.load(path)
    exact, narrow, int8, int8_cache, int4 = report.rows
    assert exact.mean_kl < 1e-6
    assert exact.perplexity_ratio == pytest.approx(1, abs=1e-4)
    assert exact.share_of_float32 >= 1
    sizes = [row.weight_bytes for row in (exact, narrow, int8, int4)]
    assert sizes == sorted(sizes, reverse=True)
    assert exact.mean_kl < narrow.mean_kl < int8.mean_kl < int4.mean_kl
    assert int8_cache.cache_bytes_per_token < int8.cache_bytes_per_token
    assert int8_cache.mean_kl > int8.mean_kl
    assert report.perplexity > 1
    assert all(row.bits_a_weight == pytest.approx(32 * row.share_of_float32) for row in report.rows)
    assert "perplexity" in result.output


def test_a_report_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"schema": "hasten.bench.ops/1"}))
    with pytest.raises(InputError, match=quality.SCHEMA):
        quality.load(path)
