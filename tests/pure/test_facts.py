"""Machine facts, read from made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.base.cache import cache_folder
from hasten.base.errors import ConfigError, InputError
from hasten.base.facts import ISA_FLAGS, ISA_LEVELS, accelerators, detect

AVX512 = "fpu avx2 fma f16c avx512f avx512bw avx512dq avx512vl"
AMX = f"{AVX512} avx512_bf16 amx_tile amx_bf16 amx_int8"


def machine(root: Path, flags: str = AVX512, files: dict[str, str] | None = None) -> Path:
    """A root folder that looks like a Linux machine."""
    key = "Features" if "asimd" in flags else "flags"
    contents = {
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: Made Up 9000\n{key}\t\t: {flags}\n",
        "proc/meminfo": "MemTotal:       16000000 kB\n",
        "proc/self/cgroup": "0::/\n",
    }
    for name, text in (contents | (files or {})).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("flags", "level", "bf16"),
    [
        ("fpu sse2", "generic", False),
        ("avx2 fma", "generic", False),
        ("avx2 fma f16c", "avx2", False),
        (AVX512, "avx512", False),
        (f"{AVX512} avx512_bf16", "avx512", True),
        (AMX, "amx", True),
        # The system saves no 512-bit registers: Linux then clears those flags, and AMX alone does not count.
        ("avx2 fma f16c amx_tile amx_bf16 amx_int8", "avx2", True),
        ("fp asimd bf16", "generic", True),
        ("fp asimd", "generic", False),
    ],
)
def test_levels_by_flags(flags: str, level: str, bf16: bool, tmp_path: Path) -> None:
    facts = detect(environ={}, root=machine(tmp_path, flags))
    assert (facts.isa_available.value, facts.isa.value) == (level, level)
    assert facts.bf16_in_hardware.value is bf16
    assert facts.default_dtype().value == ("bf16" if bf16 else "fp32")
    assert "bf16" in facts.default_dtype().source


def test_forced_level(tmp_path: Path) -> None:
    root = machine(tmp_path)
    for level in ("generic", "avx2", "avx512"):
        facts = detect(environ={"HASTEN_ISA": level.upper()}, root=root)
        assert (facts.isa.value, facts.isa.source) == (level, "HASTEN_ISA")
    with pytest.raises(
        ConfigError, match=r"HASTEN_ISA asks for 'amx', but this machine has 'avx512'.*allowed: generic"
    ):
        detect(environ={"HASTEN_ISA": "amx"}, root=root)
    with pytest.raises(ConfigError, match="did you mean 'avx512'"):
        detect(environ={"HASTEN_ISA": "avx51"}, root=root)
    assert detect({"isa": "avx2"}, {"HASTEN_ISA": "generic"}, root).isa.source == "argument hardware"
    with pytest.raises(ConfigError, match="argument hardware asks for 'amx'"):
        detect({"isa": "amx"}, {}, root)


def test_reasons(tmp_path: Path) -> None:
    facts = detect(environ={"HASTEN_ISA": "avx2"}, root=machine(tmp_path))
    assert facts.isa_reason("avx2") == "in force"
    assert facts.isa_reason("generic") == "available, a higher level is in force"
    assert facts.isa_reason("avx512") == "available, not used: HASTEN_ISA"
    assert facts.isa_reason("amx") == "no: the processor lacks amx_tile, amx_bf16, amx_int8, avx512_bf16"
    with pytest.raises(ConfigError, match="did you mean 'avx2'"):
        facts.isa_reason("avx")


@given(st.sets(st.sampled_from(sorted({flag for flags in ISA_FLAGS.values() for flag in flags}))))
def test_a_level_needs_every_flag_below_it(present: set[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        level = detect(environ={}, root=machine(Path(folder), "fpu " + " ".join(sorted(present)))).isa.value
    for name in ISA_LEVELS[: ISA_LEVELS.index(level) + 1]:
        assert set(ISA_FLAGS[name]) <= present
    above = ISA_LEVELS[ISA_LEVELS.index(level) + 1 :]
    assert not above or not set(ISA_FLAGS[above[0]]) <= present


def test_overrides(tmp_path: Path) -> None:
    root = machine(tmp_path, AMX)
    facts = detect({"bf16_in_hardware": False, "cores": 64}, {}, root)
    assert facts.default_dtype().value == "fp32"
    assert str(facts.cores) == "64 (argument hardware)"
    with pytest.raises(ConfigError, match=r"'core' is unknown.*did you mean 'cores'"):
        detect({"core": 1}, {}, root)


@pytest.mark.parametrize(
    ("files", "cores", "memory", "source"),
    [
        ({}, None, 16_384_000_000, "MemTotal"),
        (
            {"sys/fs/cgroup/cpu.max": "50000 100000", "sys/fs/cgroup/memory.max": "max"},
            1,
            16_384_000_000,
            "MemTotal",
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "1000000000",
                "sys/fs/cgroup/a/b/memory.max": "2000000000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            None,
            1_000_000_000,
            "cgroup memory.max",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "3000000000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "10000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            1,
            3_000_000_000,
            "cgroup memory.limit_in_bytes",
        ),
    ],
)
def test_limits_of_a_container(
    files: dict[str, str], cores: int | None, memory: int, source: str, tmp_path: Path
) -> None:
    facts = detect(environ={}, root=machine(tmp_path, files=files))
    assert facts.cores.value == (cores or len(os.sched_getaffinity(0)))
    assert facts.memory_bytes.value == 16_384_000_000
    assert facts.memory_limit_bytes.value == memory
    assert source in facts.memory_limit_bytes.source


@pytest.mark.parametrize(
    ("siblings", "allowed", "expected"),
    [
        (("0,4", "1,5", "0,4", "1,5"), {0, 1, 2, 3}, 2),
        (("0,4", "1,5", "0,4", "1,5"), {0, 1}, 2),
        (("0,4", "1,5", "0,4", "1,5"), {1, 3}, 1),
        (("0", "1", "2", "3"), {0, 1, 2, 3}, 4),
        (("0,1", "0,1", "", ""), {0, 1, 2}, 3),  # not told: all count
    ],
)
def test_hardware_threads_of_one_core_count_once(
    siblings: tuple[str, ...],
    allowed: set[int],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n"
        for cpu, text in enumerate(siblings)
        if text
    }
    facts = detect(environ={}, root=machine(tmp_path / "a", files=files))
    assert (facts.cores.value, facts.physical_cores.value) == (len(allowed), expected)
    quota = files | {"sys/fs/cgroup/cpu.max": "100000 100000"}
    assert detect(environ={}, root=machine(tmp_path / "b", files=quota)).physical_cores.value == 1


def test_caches_and_an_empty_machine(tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu/cpu0/cache/index2"
    files = {f"{folder}/level": "2\n", f"{folder}/type": "Unified\n", f"{folder}/size": "1024K\n"}
    (cache,) = detect(environ={}, root=machine(tmp_path / "a", files=files)).caches.value
    assert (cache.level, cache.kind, cache.size_bytes, cache.shared_by) == (2, "Unified", 1 << 20, "")
    empty = detect(environ={}, root=tmp_path / "empty")
    assert empty.isa.value == "generic"
    assert empty.caches.value == ()
    assert empty.cores.value >= 1
    assert empty.memory_bytes.value > 0


def test_this_machine() -> None:
    facts = detect(environ={})
    assert 1 <= facts.cores.value <= (os.cpu_count() or 1)
    assert 0 < facts.memory_limit_bytes.value <= facts.memory_bytes.value
    assert facts.isa.value == facts.isa_available.value
    found = accelerators()
    assert set(found) == {"gpu", "npu"}
    assert all(fact.source for fact in found.values())


def test_cache_folder(tmp_path: Path) -> None:
    assert cache_folder("~/x", {"HASTEN_CACHE_DIR": "/y"}).value == Path.home() / "x"
    assert (
        str(cache_folder(None, {"HASTEN_CACHE_DIR": "/y", "XDG_CACHE_HOME": "/z"})) == "/y (HASTEN_CACHE_DIR)"
    )
    assert str(cache_folder(None, {"XDG_CACHE_HOME": "/z"})) == "/z/hasten (XDG_CACHE_HOME)"
    assert cache_folder(None, {}).value == Path.home() / ".cache" / "hasten"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; give a folder"):
        cache_folder(tmp_path / "file")
