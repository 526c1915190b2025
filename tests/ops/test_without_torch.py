"""What runs without torch: the doors of serving.so, its threads, and memory by its address."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hasten.base.facts import detect
from hasten.bench.memory import resident_bytes
from hasten.ops import level, native
from hasten.ops.memory import address, aligned, pages, take_pages


def run(code: str, folder: Path) -> list[str]:
    """What Python prints, in a folder that may hold another hasten."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()


needs_kernels = pytest.mark.skipif(level.state().level is None, reason=level.state().reason)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
@pytest.mark.parametrize("count", [0, 1, 63, 4097])
def test_memory_by_its_address(count: int, dtype: type) -> None:
    for make, at in ((aligned, 64), (pages, 4096)):
        array = make(count, dtype)
        assert (array.shape, array.dtype) == ((count,), dtype)
        assert not array.any()
        assert count == 0 or address(array) % at == 0
        array[:] = 7
        assert array.tolist() == [7] * count


def test_pages_live_as_long_as_their_views() -> None:
    part = pages(1 << 20)[5:9]
    part[:] = 3
    others = [pages(1 << 20) for _ in range(8)]
    assert part.tolist() == [3] * 4
    assert not any(other.any() for other in others)


def test_pages_are_taken_ahead_and_keep_what_they_hold() -> None:
    array = pages(1 << 22, np.float32)
    array[100] = 5.0
    before = resident_bytes()
    take_pages(array[1000:2_000_000])
    taken = resident_bytes() - before
    linux = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if sys.platform == "linux" and linux >= (5, 14):
        assert 7_500_000 < taken < 12_000_000
    assert array[100] == 5.0
    assert np.count_nonzero(array) == 1


def test_more_pages_than_there_are() -> None:
    for count in (1 << 61, 1 << 70):
        with pytest.raises(MemoryError, match=r"GB cannot be had"):
            pages(count)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What `threads` takes for the modules that are loaded: none."""
    held: dict[str, Any] = {}
    monkeypatch.setattr(level, "sys", SimpleNamespace(modules=held))
    level._own_threads.cache_clear()
    yield held
    level._own_threads.cache_clear()


@pytest.mark.parametrize(
    ("given", "expected"), [("3", 3), ("4,2", 4), ("0", None), ("many", None), ("", None)]
)
def test_threads_without_torch(
    given: str, expected: int | None, monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert level.threads() == (expected or detect().physical_cores.value)


def test_threads_are_torchs_where_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    modules["torch"] = SimpleNamespace(get_num_threads=lambda: 5)
    assert level.threads() == 5
    # Another thread imports it: its functions come last.
    modules["torch"] = ModuleType("torch")
    assert level.threads() == 3


@needs_kernels
def test_a_library_of_other_code_is_refused_with_a_reason(tmp_path: Path) -> None:
    """As where the sources are new and the libraries old: nothing is read by a layout that is another."""
    package = tmp_path / "hasten"
    shutil.copytree(Path(level.__file__).parents[1], package, ignore=shutil.ignore_patterns("*.cpp", "*.h"))
    code = "from hasten.ops import level, native; print(level.state().reason); print(native.state().level)"
    source = package / "ops" / "level.py"
    stale = {
        "another layout": source.read_text().replace("\nLAYOUT = 1\n", "\nLAYOUT = 2\n"),
        "no such door": source.read_text().replace('"hasten_layout"', '"hasten_nothing"'),
    }
    for what, text in stale.items():
        source.write_text(text)
        done = run(code, tmp_path)
        reason = "serving.so does not load, install hasten again: it was built from other code"
        assert done == [reason, "None"], what


@needs_kernels
def test_programs_run_where_only_torchs_door_is_missing(tmp_path: Path) -> None:
    package = tmp_path / "hasten"
    ignored = shutil.ignore_patterns("*.cpp", "*.h", "binding.so")
    shutil.copytree(Path(level.__file__).parents[1], package, ignore=ignored)
    code = (
        "import numpy as np\n"
        "from hasten.ops import level, native, sampling\n"
        "print(sampling.argmax(np.arange(12, dtype=np.float32).reshape(3, 4), [2, 0]).tolist())\n"
        "print(level.launches() > 0, native.state().level, native.state().reason)"
    )
    lines = run(code, tmp_path)
    assert lines[0] == "[3, 3]"
    assert lines[1].startswith("True None binding.so does not load")


@needs_kernels
def test_a_product_is_lent_once_torch_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The order that AMX machines run: by several threads, and without torch's operators."""
    given = []
    monkeypatch.setattr(level, "_DOORS", SimpleNamespace(lend=lambda *words: given.append(words)))
    level.lend_product()
    assert bool(given) == level.state().amx
    given.clear()
    monkeypatch.setattr(level, "_STATE", level.State("amx", "made up", True, True))
    workers = [threading.Thread(target=level.lend_product) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert given == [native.brgemm()] * 4
    assert all(given[0])
    monkeypatch.setattr(native, "_STATE", native.State(None, "no binding"))
    level.lend_product()
    assert len(given) == 4
    assert "programs run without AMX: no binding" in caplog.text


@needs_kernels
def test_errors_of_native_code_are_pythons() -> None:
    from hasten.ops import sampling

    with pytest.raises(IndexError, match="argmax: row 9 of 2"):
        sampling.argmax(np.zeros((2, 3), np.float32), [9])
    empty = np.zeros(16, np.int64)
    with pytest.raises(RuntimeError, match="an empty step"):
        level.doors().program_run(address(empty), address(empty))
