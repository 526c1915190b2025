"""Every level of the native kernels: the operators at it, the choice of it, and what its library holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.base.errors import ConfigError
from hasten.base.facts import ISA_LEVELS, Fact, detect
from hasten.ops import level as level_of

PACKAGE = Path(hasten.__file__).parent
KERNELS = PACKAGE / "ops" / "_cpu"
SUITE = Path(__file__).with_name("level_suite.py")

built = pytest.mark.skipif(not (KERNELS / "serving.so").exists(), reason="the native kernels are not built")
needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")


def python(*arguments: str, package: Path = PACKAGE, **environ: str) -> subprocess.CompletedProcess[str]:
    """A process of its own. Its threads wait without spinning, since tests share the processor."""
    kept = {k: v for k, v in os.environ.items() if k not in ("HASTEN_ISA", "HASTEN_NATIVE")}
    paths = {"PYTHONPATH": str(package.parent), "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=kept | paths | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


def suite(*arguments: str, package: Path = PACKAGE, **environ: str) -> dict[str, Any]:
    """Runs the suite and returns what it printed; every check must have passed."""
    done = python(str(SUITE), *arguments, package=package, **environ)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["package"] == str(package)
    assert found["failures"] == []
    return found


def require(level: str) -> None:
    """Skips a level that this machine lacks."""
    facts = detect(environ={})
    if ISA_LEVELS.index(level) > ISA_LEVELS.index(facts.isa_available.value):
        pytest.skip(f"{level}: {facts.isa_reason(level)}")


def library_of(level: str) -> Path:
    path = KERNELS / f"kernels_{level}.so"
    if not path.exists():
        pytest.skip(f"{path.name} is not built")
    return path


@built
@pytest.mark.parametrize("level", ISA_LEVELS)
def test_every_operator_at_every_level(level: str) -> None:
    require(level)
    found = suite(HASTEN_ISA=level)
    assert (found["state"]["level"], found["isa"]) == (level, level)
    assert found["checks"] > 500
    unused = [name for name, count in found["calls"].items() if not count]
    assert found["calls"]
    assert not unused, f"the suite calls no case of {unused}"


@built
@pytest.mark.parametrize("refused", [False, True])
def test_products_by_torch(refused: bool) -> None:
    """The form that AMX machines run; torch's product takes bf16 from AVX-512 on.

    Where the user limits oneDNN below that, torch refuses it, and our own products do the work.
    """
    require("avx512")
    if "avx512_bf16" not in detect().flags.value:
        pytest.skip("the processor lacks avx512_bf16")
    limit = {"ONEDNN_MAX_CPU_ISA": "AVX2"} if refused else {}
    found = suite("--brgemm", *(["--smallest"] if refused else []), HASTEN_ISA="avx512", **limit)
    assert found["calls"]["attention"]
    assert found["calls"]["attention_backward"]


@built
def test_same_bits_in_every_run_and_at_every_number_of_threads() -> None:
    """A race would show. Attention may split its keys by the number of threads: then its bits differ between
    those, within the budget that every other test holds it to. No other kernel's sum depends on it; torch's
    own products and sums may.
    """
    found = suite("--threads")
    assert found["checks"] > 80
    assert set(found["differ"]) <= {"attention"}


def test_switched_off() -> None:
    found = suite("--smallest", HASTEN_NATIVE="0")
    assert (found["state"]["level"], found["state"]["reason"]) == (None, "HASTEN_NATIVE=0")
    assert not any(found["calls"].values())


@pytest.mark.parametrize("missing", ["*.so", "kernels_*.so"])
def test_package_without_libraries(missing: str, tmp_path: Path) -> None:
    """As installed where no compiler is: it works, and says why it is slower."""
    if missing != "*.so":
        library_of("generic")
    package = tmp_path / "hasten"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns(missing, "__pycache__", "*.cpp", "*.h"))
    found = suite("--smallest", package=package)
    assert found["state"]["level"] is None
    assert re.fullmatch(
        r"(serving|kernels_\w+)\.so was not built: install a C\+\+ compiler and install hasten again",
        found["state"]["reason"],
    )
    assert not any(found["calls"].values())


def test_level_above_the_processor() -> None:
    facts = detect(environ={})
    above = ISA_LEVELS[ISA_LEVELS.index(facts.isa_available.value) + 1 :]
    if not above:
        pytest.skip("this processor has every level")
    done = python("-c", "import hasten.ops.native", HASTEN_ISA=above[0])
    assert done.returncode == 1  # an exception, not the signal of an illegal instruction
    assert f"HASTEN_ISA asks for '{above[0]}', but this machine has" in done.stderr


def test_unknown_level() -> None:
    done = python("-m", "hasten", "doctor", HASTEN_ISA="avx1024")
    assert done.returncode == 2
    assert "unknown instruction level 'avx1024'" in done.stderr
    assert "did you mean" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("registers", "level"),
    [(0x600E7, "amx"), (0xE7, "avx512"), (0x7, "avx2"), (0x67, "avx2"), (0x3, "generic"), (0, "generic")],
)
def test_registers_that_the_system_does_not_save(registers: int, level: str) -> None:
    facts = replace(detect(environ={}), isa=Fact("amx", "highest available: made up"))
    assert level_of.saved_level(facts, registers) == level
    forced = replace(facts, isa=Fact("amx", "HASTEN_ISA"))
    if level == "amx":
        assert level_of.saved_level(forced, registers) == "amx"
        return
    allowed = ", ".join(ISA_LEVELS[: ISA_LEVELS.index(level) + 1])
    with pytest.raises(ConfigError, match=rf"HASTEN_ISA asks for 'amx'.*allowed: {allowed}$"):
        level_of.saved_level(forced, registers)


@built
def test_the_registers_agree_with_the_flags() -> None:
    """What XGETBV says covers the level that the kernel's list of flags gives."""
    facts = detect(environ={})
    assert level_of.saved_level(facts, level_of.doors().saved_registers()) == facts.isa_available.value


def instructions(library: Path) -> list[tuple[str, str, str]]:
    """(function, first byte, text) of every instruction."""
    listing = subprocess.run(["objdump", "-dwC", str(library)], capture_output=True, text=True, check=True)
    found, function = [], ""
    for line in listing.stdout.splitlines():
        if match := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = match[1]
        elif len(parts := line.split("\t")) >= 3:
            found.append((function, parts[1].split()[0], parts[2]))
    assert len(found) > 1000
    return found


x86 = pytest.mark.skipif(
    detect(environ={}).architecture.value not in ("x86_64", "amd64"), reason="x86 instructions"
)


@x86
@built
@needs_objdump
@pytest.mark.parametrize("level", ["generic", "avx2"])
def test_a_level_holds_no_instruction_of_a_higher_one(level: str) -> None:
    """62 begins an EVEX instruction (AVX-512), C4 and C5 a VEX one (AVX, AVX2)."""
    forbidden = {"62"} if level == "avx2" else {"62", "c4", "c5"}
    strange = [(f, text) for f, byte, text in instructions(library_of(level)) if byte in forbidden]
    assert strange == []


@x86
@built
@needs_objdump
@pytest.mark.parametrize("door", ["binding", "serving"])
def test_a_door_holds_no_instruction_of_a_level(door: str) -> None:
    """It runs before a level is chosen. `xgetbv` is guarded by CPUID."""
    strange = [
        (f, text) for f, byte, text in instructions(KERNELS / f"{door}.so") if byte in ("62", "c4", "c5")
    ]
    assert strange == []


@x86
@built
@needs_objdump
@pytest.mark.parametrize(
    ("extension", "owner"),
    [(r"v(dpbf16ps|cvtne2?ps2bf16)|v?tdp", "PairBF16"), (r"vpdp(bu|ww)s", "BytesVNNI")],
)
def test_extensions_stay_in_their_own_functions(extension: str, owner: str) -> None:
    """AVX512-BF16 and AVX512-VNNI are extensions: only functions made for pairs of bf16 and for quads of
    bytes hold them, and they are asked for by name.
    """
    found = [
        function for function, _, text in instructions(library_of("avx512")) if re.match(extension, text)
    ]
    assert found
    assert {function for function in found if owner not in function} == set()


@built
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_exported_symbols() -> None:
    """Two levels in one process must not share an inline function, nor the binding hold one of theirs."""

    def exported(library: Path) -> list[str]:
        listing = subprocess.run(["nm", "-DC", "--defined-only", library], capture_output=True, text=True)
        return [line.split(maxsplit=2)[2] for line in listing.stdout.splitlines()]

    for library in sorted(KERNELS.glob("kernels_*.so")):
        assert exported(library) == ["hasten_kernels"]
    assert [name for name in exported(KERNELS / "binding.so") if "hasten" in name] == []
    own = [name for name in exported(KERNELS / "serving.so") if "hasten" in name]
    assert own
    assert all(name.startswith("hasten_") for name in own)
