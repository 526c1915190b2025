"""The flags that llama.cpp is built with are those that the processor has."""

from __future__ import annotations

import shlex

import pytest

from hasten.base.facts import detect
from hasten.bench import llama_build

AVX2 = {"sse2", "sse4_2", "avx", "avx2", "bmi2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}


def _on(flags: set[str]) -> set[str]:
    return {
        word.removeprefix("-D").removesuffix("=ON")
        for word in llama_build.cmake_args(flags).split()
        if word.endswith("=ON")
    }


@pytest.mark.parametrize(
    ("flags", "on"),
    [
        ({"sse2"}, set()),
        (AVX2, {"GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C"}),
        (AVX512 - {"avx512bw"} | {"avx512_vnni"}, _on(AVX2)),
        (AVX512 | {"avx512_vnni"}, _on(AVX2) | {"GGML_AVX512", "GGML_AVX512_VNNI"}),
        (AVX512 | {"amx_tile", "amx_int8", "amx_bf16"}, _on(AVX2) | {"GGML_AVX512"}),
    ],
)
def test_what_the_processor_lacks_is_off(flags: set[str], on: set[str]):
    assert _on(flags) == on
    words = llama_build.cmake_args(flags).split()
    assert words[0] == "-DGGML_NATIVE=OFF"
    assert len(words) == 1 + len(llama_build.OPTIONS)


def test_another_architecture_builds_natively():
    assert llama_build.cmake_args({"asimd", "fp"}) == "-DGGML_NATIVE=ON"


def test_the_command_is_one_line_for_a_shell(capsys: pytest.CaptureFixture[str]):
    assert llama_build.main() == 0
    line = capsys.readouterr().out.strip()
    words = shlex.split(line)
    assert words[0] == f"CMAKE_ARGS={llama_build.cmake_args(detect().flags.value)}"
    assert words[-1].startswith("llama-cpp-python")
