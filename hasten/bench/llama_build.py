"""How to build llama-cpp-python for this processor: `python -m hasten.bench.llama_build` prints the command.

Its own native build asks the compiler for everything that the processor's family has, which is not always
what the machine grants: a virtual machine may hide a set of instructions, and the program then dies of an
illegal one. Here each set is switched on only where /proc/cpuinfo has its flags, which is where Linux says
what it saves and allows.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Set
from importlib.util import find_spec

from hasten.base.facts import detect

REQUIREMENT = "llama-cpp-python>=0.3.36"
# CMake options of ggml (ggml/CMakeLists.txt), and the flags of /proc/cpuinfo that each needs. A set of
# AVX-512 is taken only with the base that ggml's AVX512 means: F, CD, VL, DQ and BW.
_AVX512 = ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw")
OPTIONS: dict[str, tuple[str, ...]] = {
    "GGML_SSE42": ("sse4_2",),
    "GGML_AVX": ("avx",),
    "GGML_AVX2": ("avx2",),
    "GGML_BMI2": ("bmi2",),
    "GGML_FMA": ("fma",),
    "GGML_F16C": ("f16c",),
    "GGML_AVX_VNNI": ("avx_vnni",),
    "GGML_AVX512": _AVX512,
    "GGML_AVX512_VBMI": (*_AVX512, "avx512vbmi"),
    "GGML_AVX512_VNNI": (*_AVX512, "avx512_vnni"),
    "GGML_AVX512_BF16": (*_AVX512, "avx512_bf16"),
}
"""AMX is left out: a native build with it died of an illegal instruction on a virtual machine whose processor
has it (0.3.36, 2026-11)."""


def cmake_args(flags: Set[str]) -> str:
    """The value of CMAKE_ARGS for a processor with these flags of /proc/cpuinfo; not x86: a native build."""
    if "sse2" not in flags:
        return "-DGGML_NATIVE=ON"
    chosen = [
        f"-D{option}={'ON' if all(flag in flags for flag in needed) else 'OFF'}"
        for option, needed in OPTIONS.items()
    ]
    return " ".join(["-DGGML_NATIVE=OFF", *chosen])


def build_command(flags: Set[str], python: str = sys.executable) -> str:
    """The line for a shell; the build takes 5 to 10 minutes on two cores."""
    pip = shlex.join([python, "-m", "pip", "install", "--no-cache-dir", REQUIREMENT])
    return f"CMAKE_ARGS={shlex.quote(cmake_args(flags))} {pip}"


def main() -> int:
    """Entry point: prints the command, and whether the package is there already."""
    print(build_command(detect().flags.value))
    if find_spec("llama_cpp") is not None:
        print("llama-cpp-python is installed already; the command above builds it anew", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
