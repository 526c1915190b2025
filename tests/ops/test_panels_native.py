"""The native products with panels against float64 of the unpacked matrix, at every level of this machine.

The level's library is loaded into this process for the test and the usual one afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import panels_checks as checks
import pytest
import torch

from hasten.base.errors import ConfigError, ShapeError
from hasten.base.facts import ISA_LEVELS, detect
from hasten.ops import native
from hasten.ops.panels import BFLOAT16, FLOAT32, Format, quantised
from hasten.ops.panels.native import linear, native_format, rows
from hasten.ops.panels.reference import pack

KERNELS = Path(native.__file__).parent / "_cpu"

pytestmark = pytest.mark.skipif(native.state().level is None, reason=native.state().reason)


@dataclass(frozen=True)
class How:
    """A level's library and what of the processor it may use."""

    level: str
    bf16: bool = False
    vnni: bool = False
    brgemm: bool = False

    def __str__(self) -> str:
        return "-".join([self.level, *(name for name in ("bf16", "vnni", "brgemm") if getattr(self, name))])

    def missing(self) -> str:
        """What this machine lacks; empty if nothing."""
        facts = detect(environ={})
        if ISA_LEVELS.index(self.level) > ISA_LEVELS.index(facts.isa_available.value):
            return f"{self.level}: {facts.isa_reason(self.level)}"
        for wanted, flag in ((self.bf16, "avx512_bf16"), (self.vnni, "avx512_vnni")):
            if wanted and flag not in facts.flags.value:
                return f"the processor lacks {flag}"
        if not (KERNELS / f"kernels_{self.level}.so").exists():
            return f"kernels_{self.level}.so is not built"
        return ""


WAYS = (
    How("generic"),
    How("avx2"),
    How("avx512"),
    How("avx512", bf16=True, vnni=True),
    How("avx512", bf16=True, vnni=True, brgemm=True),
    How("amx", bf16=True, vnni=True, brgemm=True),
)


def load(how: How) -> None:
    path = KERNELS / f"kernels_{how.level}.so"
    torch.ops.hasten_cpu.load(str(path), how.bf16, how.brgemm, 1 << 20, how.vnni)


@pytest.fixture(params=WAYS, ids=str)
def how(request: pytest.FixtureRequest) -> Iterator[How]:
    if reason := request.param.missing():
        pytest.skip(reason)
    load(request.param)
    yield request.param
    state = native.state()
    assert state.level is not None
    load(How(state.level, state.bf16, state.vnni, state.amx))


SHAPES = ((1, 1), (16, 32), (37, 75), (50, 100), (70, 259))


@pytest.mark.parametrize("format", checks.FORMATS, ids=str)
def test_error_is_what_rounding_x_costs(format: Format, how: How) -> None:
    for index, M in enumerate(checks.ROWS):
        checks.check_bound(format, *SHAPES[index % len(SHAPES)], M)
        checks.check_bound(format, 37, 75, M)


@pytest.mark.parametrize("format", checks.FORMATS, ids=str)
def test_small_integers_are_exact(format: Format, how: How) -> None:
    for M in checks.ROWS:
        checks.check_exact(format, 37, 130, M)


def test_more_rows_than_one_pass_takes(how: How) -> None:
    for format in checks.COMMON:
        checks.check_exact(format, 20, 650, 600)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", checks.KINDS)
def test_bias_activation_factor_scale_and_residual(kind: str, gated: bool, how: How) -> None:
    for format in checks.COMMON:
        for M in (1, 3, 40):
            checks.check_end(format, M, kind, gated)


def test_what_is_not_finite_stays_so(how: How) -> None:
    for format in checks.COMMON:
        for M in (1, 2, 9, 40):
            checks.check_not_finite(format, M)


def test_rows_of_the_matrix(how: How) -> None:
    for format in checks.FORMATS:
        checks.check_rows(format)


def test_bits_do_not_depend_on_threads(how: How) -> None:
    for format in checks.COMMON:
        for M in (1, 8, 70):
            checks.check_threads(format, M)


def test_bits_of_a_row_do_not_depend_on_the_others(how: How) -> None:
    """Dense panels sum in one order for any number of rows; quantised ones are read in integers for any
    number, unless torch's product takes many rows or integers are slow.
    """
    for format in checks.COMMON:
        for_any = format == FLOAT32 or not how.brgemm
        if how.level == "generic" or (not how.vnni and format.bits == 8):
            for_any = format.dense
        checks.check_same_row(format, (1, 2, 3, 5, 8, 9, 33, 70) if for_any else (1, 2, 3, 5, 8))


def test_different_bits_of_gate_and_factor(how: How) -> None:
    N, K = 37, 75
    gate, factor = checks.make(quantised(4, 32, True), N, K, 1), checks.make(quantised(6, 16), N, K, 2)
    for M in (1, 5, 40):
        x = torch.randn(M, K)
        alone = linear(x, gate.panels) * linear(x, factor.panels)
        torch.testing.assert_close(linear(x, gate.panels, up=factor.panels), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", checks.COMMON, ids=str)
def test_nothing_to_do(format: Format, how: How) -> None:
    made = checks.make(format, 20, 40, seed=0)
    assert linear(torch.randn(0, 40), made.panels).shape == (0, 20)
    assert linear(torch.randn(3, 0, 40), made.panels).shape == (3, 0, 20)
    assert rows(made.panels, torch.empty(0, dtype=torch.long)).shape == (0, 40)
    empty = pack(torch.empty(0, 40), FLOAT32)
    assert linear(torch.randn(2, 40), empty).shape == (2, 0)


def test_x_of_any_shape_and_strides() -> None:
    made = checks.make(quantised(4), 20, 40, seed=0)
    x = torch.randn(2, 3, 80)[..., ::2]
    y = linear(x, made.panels)
    assert y.shape == (2, 3, 20)
    assert torch.equal(y.view(6, 20), linear(x.reshape(6, 40).contiguous(), made.panels))
    assert torch.equal(linear(x.bfloat16(), made.panels), linear(x.bfloat16().float(), made.panels))


def test_blocks_of_zeros_and_of_tiny_numbers(how: How) -> None:
    made = checks.make(quantised(4, 32, True), 20, 64, seed=0)
    x = torch.zeros(2, 64)
    x[1] = 1e-38
    assert torch.equal(linear(x, made.panels)[0], torch.zeros(20))
    assert bool((linear(x, made.panels)[1].abs() < 1e-33).all())
    huge = torch.full((1, 64), 1e35)
    assert bool(linear(huge, made.panels).isfinite().all())


def test_errors_name_what_is_wrong() -> None:
    made = checks.make(quantised(4), 20, 40, seed=0)
    dense = pack(torch.randn(20, 40), BFLOAT16)
    with pytest.raises(ShapeError, match="its last size must be 40"):
        linear(torch.randn(2, 41), made.panels)
    with pytest.raises(ShapeError, match="both dense alike, quantised, or rotated"):
        linear(torch.randn(2, 40), made.panels, up=dense)
    with pytest.raises(ConfigError, match=r"activation 'sily'.*silu"):
        linear(torch.randn(2, 40), made.panels, kind="sily")
    with pytest.raises(RuntimeError, match="bias is"):
        linear(torch.randn(2, 40), made.panels, torch.randn(1))
    data = torch.from_numpy(made.panels.data)
    with pytest.raises(RuntimeError, match="takes 1152 contiguous bytes"):
        torch.ops.hasten_cpu.panel_linear(
            torch.randn(2, 40), data[:1], native_format(made.panels.format), 1.0, 20, 40
        )
    with pytest.raises(RuntimeError, match="no layout"):
        torch.ops.hasten_cpu.panel_linear(torch.randn(2, 40), data, [2, 7, 32, 0], 1.0, 20, 40)
    with pytest.raises(IndexError, match="row 20 is outside"):
        rows(made.panels, torch.tensor([20]))


def test_without_kernels_the_reference_answers() -> None:
    made = checks.make(quantised(4), 20, 40, seed=0)
    x, bias, residual = torch.randn(3, 40), torch.randn(20), torch.randn(3, 20)

    def results() -> torch.Tensor:
        return linear(x, made.panels, bias, up=made.panels, kind="silu", residual=residual, scale=0.5)

    found = results()
    with native.switched_off():
        expected = results()
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=float(expected.abs().max()) / 50)
