"""Builds the native kernels: one library for each instruction level, and two doors to them, for torch and for
serving, which needs none.

A machine without a C++ compiler gets the package without them: the operators then run their torch bodies, and
`hasten doctor` says so. With HASTEN_REQUIRE_NATIVE=1 a failing build is an error. CXX names the compiler.
HASTEN_LEVELS=generic,avx2 builds these levels only; HASTEN_SANITIZE=1 builds for `make check-native`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

OPS = Path("hasten/ops")
# GCC 12 warns of its own intrinsics (maybe-uninitialized) and of vector arguments that never leave a library.
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-unused-parameter")
COMMON = ("-fPIC", "-fvisibility=hidden", "-fno-math-errno", *WARNINGS)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
X86_LEVELS = {
    "generic": (),
    "avx2": AVX2,
    "avx512": AVX512,
    "amx": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
}
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)


class BuildKernels(build_ext):
    """Calls the compiler itself: each level has flags of its own, and none may reach another's code."""

    def run(self) -> None:
        target = self._target()
        target.mkdir(parents=True, exist_ok=True)
        try:
            build(find_compiler(), target, Path(self.build_temp))
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            if os.environ.get("HASTEN_REQUIRE_NATIVE") == "1":
                raise
            print(f"hasten: no native kernels, the torch bodies will run: {error}", file=sys.stderr)

    def _target(self) -> Path:
        in_place = self.inplace or self.editable_mode
        return OPS / "_cpu" if in_place else Path(self.build_lib) / OPS / "_cpu"

    def get_outputs(self) -> list[str]:
        return [str(path) for path in sorted(self._target().glob("*.so"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(f"no C++ compiler ({wanted or 'c++, g++, clang++'}) is on PATH")


def levels_to_build() -> dict[str, tuple[str, ...]]:
    """Flags by level: all that the architecture has, or those of HASTEN_LEVELS."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    levels: dict[str, tuple[str, ...]] = X86_LEVELS if x86 else {"generic": ()}
    chosen = os.environ.get("HASTEN_LEVELS")
    if not chosen:
        return levels
    if unknown := set(chosen.split(",")) - set(levels):
        raise SystemExit(
            f"HASTEN_LEVELS: no level {', '.join(sorted(unknown))}; there are {', '.join(levels)}"
        )
    return {name: levels[name] for name in chosen.split(",")}


def build(compiler: str, target: Path, scratch: Path) -> None:
    """Compiles every source, in parallel; links `binding.so`, `serving.so` and each `kernels_LEVEL.so`."""
    scratch.mkdir(parents=True, exist_ok=True)
    extra = SANITIZE if os.environ.get("HASTEN_SANITIZE") == "1" else ()
    levels = levels_to_build()
    kernels = [OPS / "_cpu/level.cpp", *sorted(OPS.glob("*/cpu*.cpp"))]
    serving = sorted(OPS.glob("*/serving.cpp"))
    binding = sorted({*OPS.glob("_cpu/*.cpp"), *OPS.glob("*/binding.cpp")} - {*kernels, *serving})
    # Sources, include paths and libraries of each door.
    doors = {
        "binding": (binding, torch_includes(), torch_libraries()),
        "serving": ([OPS / "_cpu/chosen.cpp", *serving], [], ["-fopenmp", "-ldl"]),
    }
    commands, objects = [], {}
    for door, (sources, includes, _) in doors.items():
        for source in sources:
            objects.setdefault(door, []).append(scratch / f"{door}_{source.parent.name}_{source.stem}.o")
            flags = ("-std=c++20", "-O2", "-fopenmp", *includes, *COMMON, *extra)
            commands.append([compiler, *flags, "-c", str(source), "-o", str(objects[door][-1])])
    for level, isa in levels.items():
        for source in kernels:
            objects.setdefault(level, []).append(scratch / f"{level}_{source.parent.name}_{source.stem}.o")
            flags = ("-std=c++17", "-O3", f"-DHASTEN_LEVEL={level}", *isa, *COMMON, *extra)
            commands.append([compiler, *flags, "-c", str(source), "-o", str(objects[level][-1])])
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(run, commands))
    linked: list[Path] = []
    for name, parts in objects.items():
        libraries = doors[name][2] if name in doors else []
        output = target / (f"{name}.so" if name in doors else f"kernels_{name}.so")
        # Linked under another name and renamed together: a process that has an old file mapped keeps it.
        linked.append(output.with_suffix(".so.new"))
        run([compiler, "-shared", *extra, *map(str, parts), *libraries, "-o", str(linked[-1])])
    for fresh in linked:
        fresh.replace(fresh.with_suffix(""))


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(" ".join(command), done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)


def torch_includes() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    return [flag for path in include_paths() for flag in ("-isystem", path)]


def torch_libraries() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    # torch brings the OpenMP runtime: libgomp is named, torch's own copy is found, being loaded already.
    return [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10", "-fopenmp"]


setup(
    ext_modules=[Extension("hasten.ops._cpu.binding", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
