"""The report on disk, and how it is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hasten.base.errors import InputError
from hasten.bench import compare, report, table
from hasten.bench.contenders import CONTENDERS

FORMAT = Path(__file__).parents[2] / "docs/formats/report.md"


@pytest.fixture
def example() -> report.BenchReport:
    limits = report.Limits(
        gemm_flops_per_s=4e11,
        gemm_flops_per_s_by_dtype={"float32": 1e11, "bfloat16": 4e11},
        read_bytes_per_s=2e10,
        threads=2,
    )
    size = report.ModelSize(
        parameters=134_515_008, product_parameters=134_480_000, attention_width=17_280, sees_documents=True
    )
    contenders = {}
    for name, step_s, peak in (("eager-bf16", 3.0, 4_000_000_000), ("hasten", 2.0, 3_000_000_000)):
        measured = report.Round(
            open_s=5.0,
            first_forward_s=1.5 if name == "eager-bf16" else 4.0,
            first_step_s=6.0,
            steps_s=[6.0, step_s, step_s],
            losses=[1.5, 1.4, 1.3],
            peak_rss_bytes=peak,
            rss_open_bytes=1_000_000_000,
            peak_rss_first_step_bytes=2_000_000_000,
            text="lines of a file",
        )
        contenders[name] = compare.summarise(CONTENDERS[name], True, [measured], 1024, 1e12, limits)
    agreed = compare.agreements(contenders, 1024)
    return report.BenchReport(
        date="2026-01-01T00:00:00+00:00",
        command="hasten demo",
        machine={"processor": "Example 1"},
        versions={"python": "3.11"},
        level=None,
        workload=report.Workload(
            model="smollm2-135m",
            task="clm",
            size=size,
            data="python-stdlib",
            batch=2,
            sequence_tokens=512,
            tokens_per_step=1024,
            documents=7,
            steps=3,
            rounds=1,
            learning_rate=1e-4,
            seed=0,
            flops_per_step=1e12,
            visible_keys_per_step=1e5,
            prompt="def f():",
        ),
        limits=limits,
        contenders=contenders,
        failed={},
        skipped={},
        interrupted=None,
        ratios=compare.ratios(contenders, agreed),
        agree=True,
        agreement=agreed,
    )


def test_what_is_written_is_what_is_read(example: report.BenchReport, tmp_path: Path):
    path = tmp_path / "report.json"
    report.save(example, path)
    assert report.load(path) == example
    raw = json.loads(path.read_text())
    assert raw["schema"] == report.SCHEMA
    for contender in raw["contenders"].values():
        assert {"step_s", "open_s", "first_forward_s", "first_step_s"} <= set(contender)
        assert {"tokens_per_s", "peak_rss_bytes", "losses"} <= set(contender)
    assert {"gemm_flops_per_s", "read_bytes_per_s"} <= set(raw["limits"])
    assert {"ratios", "agree", "date", "command", "machine", "versions"} <= set(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a report"),
        ("{}", "not a report of schema"),
        ('{"schema": "hasten.bench.train/2"}', r"schema hasten\.bench\.train/3: schema"),
        ('{"schema": "hasten.bench.train/4"}', r"schema hasten\.bench\.train/3: schema"),
    ],
)
def test_a_file_of_another_form_is_refused(text: str, message: str, tmp_path: Path):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        report.load(path)


def test_a_missing_report_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(InputError, match="hasten bench train --json"):
        report.load(tmp_path / "none.json")


def test_a_report_that_cannot_be_written_is_found_before_the_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "report.json", tmp_path):
        with pytest.raises(InputError, match="cannot write the report"):
            report.check_writable(path)
    report.check_writable(tmp_path / "new" / "folder" / "report.json")
    assert (tmp_path / "new" / "folder").is_dir()


def test_every_field_is_documented():
    text = FORMAT.read_text()
    for model in (
        report.BenchReport,
        report.Workload,
        report.ModelSize,
        report.Limits,
        report.Contender,
        report.Round,
        report.Ratio,
        report.Agreement,
        report.Interruption,
    ):
        for name, field in model.model_fields.items():
            assert f"`{field.alias or name}`" in text, f"{model.__name__}.{name} is missing in {FORMAT.name}"


def test_markdown_has_the_numbers_and_the_ratio(example: report.BenchReport):
    text = table.markdown(example)
    assert "| `hasten` | 512 | 2.00 s | 6.0 s | 3.00 GB | 1.5000 | 1.3000 | 125% |" in text
    assert (
        "hasten against eager-bf16: 1.50x the speed, 0.75x the peak memory, first forward 2.5 s later" in text
    )
    assert "eager-bf16 5.0 s, 1.5 s; hasten 5.0 s, 4.0 s" in text
    assert "losses of hasten and eager-bf16 agree" in text


def test_a_report_that_was_cut_short_says_so_first(example: report.BenchReport):
    assert "CUT SHORT" not in table.markdown(example)
    cut = report.Interruption(signal="SIGTERM", during="compile-bf16 (round 2 of 3)")
    text = table.markdown(example.model_copy(update={"interrupted": cut}))
    first = next(line for line in text.splitlines() if line.startswith("- "))
    assert "CUT SHORT by SIGTERM during compile-bf16 (round 2 of 3)" in first


def test_no_speed_up_is_shown_where_losses_differ(example: report.BenchReport):
    broken = dict(example.contenders)
    broken["hasten"] = broken["hasten"].model_copy(update={"losses": [1.6, 1.4, 1.3]})
    agreed = compare.agreements(broken, 1024)
    changed = example.model_copy(
        update={
            "contenders": broken,
            "agreement": agreed,
            "ratios": compare.ratios(broken, agreed),
            "agree": False,
        }
    )
    text = table.markdown(changed)
    assert "x the speed" not in text
    assert "DO NOT agree" in text


def test_the_table_goes_between_its_marks(example: report.BenchReport, tmp_path: Path):
    readme, source = tmp_path / "README.md", tmp_path / "report.json"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    report.save(example, source)
    assert table.main([str(source), "--into", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\nsmollm2-135m")
    assert text.endswith(f"{table.END}\nafter\n")
    assert "old" not in text


def test_a_file_without_marks_is_left_alone(example: report.BenchReport, tmp_path: Path, capsys):
    readme, source = tmp_path / "README.md", tmp_path / "report.json"
    readme.write_text("no marks")
    report.save(example, source)
    assert table.main([str(source), "--into", str(readme)]) == 2
    assert readme.read_text() == "no marks"
    assert table.BEGIN in capsys.readouterr().err


def test_the_table_fits_into_80_columns(example: report.BenchReport):
    work = example.workload.model_copy(update={"model": "tiny:llama:hidden_size=8"})
    wide = example.model_copy(
        update={
            "workload": work,
            "contenders": {"eager-bf16-malloc": example.contenders["hasten"], **example.contenders},
        }
    )
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(table.render(wide))
    text = console.file.getvalue()
    assert "…" not in text
    assert "eager-bf16-malloc" in text
    assert "tiny:llama:hidden_size=8" in text
