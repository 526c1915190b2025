"""Panels: the bytes lie where the design page says, and come back as what they stand for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.base.errors import ConfigError, ShapeError
from hasten.ops import panels
from hasten.ops.panels import Format, Panels, named, quantised, rotated
from hasten.ops.panels.formats import GGUF, GROUPS, PLANES
from hasten.ops.panels.reference import linear, pack, pack_codes, unpack
from hasten.ops.panels.rotation import rotate, rotated_weights

QUANTISED = [
    Format("quantised", bits, group, zero)
    for bits, group in itertools.product(PLANES, GROUPS)
    if not (1 in PLANES[bits] and group < 32)
    for zero in (None, 1 << bits - 1)
]
ROTATED = [rotated(bits, minima) for bits in PLANES for minima in (False, True)]
SIZES = [(1, 1), (3, 31), (16, 128), (17, 33), (35, 200), (64, 129)]


def random_codes(format: Format, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(N * 1000 + K)
    codes = torch.randint(0, format.highest + 1, (N, K), dtype=torch.uint8, generator=generator)
    scales = torch.rand(N, format.groups(K), generator=generator).half()
    minima = -torch.rand(N, format.groups(K), generator=generator).half() if format.minima else None
    return codes, scales, minima


def meant(
    format: Format, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, unit: float
) -> torch.Tensor:
    """unit * (scale * q + minimum) in float64, element by element of the definition."""
    wide = [scales.double().repeat_interleave(format.group, 1)[:, : codes.shape[1]]]
    wide.append(
        wide[0] * -float(format.zero or 0)
        if minima is None
        else minima.double().repeat_interleave(format.group, 1)[:, : codes.shape[1]]
    )
    return unit * (wide[0] * codes.double() + wide[1])


@pytest.mark.parametrize("format", ROTATED, ids=str)
def test_codes_of_a_rotated_matrix_come_back_as_the_matrix(format: Format) -> None:
    for N, K in SIZES:
        codes, scales, minima = random_codes(format, N, K)
        packed = pack_codes(codes, scales, minima, format, unit=0.25)
        truth = rotate(meant(format, codes, scales, minima, 0.25))
        size = float(truth.abs().max())
        torch.testing.assert_close(unpack(packed).double(), truth, rtol=1e-6, atol=1e-6 * size)
        torch.testing.assert_close(rotated_weights(truth), meant(format, codes, scales, minima, 0.25))


@pytest.mark.parametrize("format", QUANTISED, ids=str)
def test_codes_come_back(format: Format) -> None:
    for N, K in SIZES:
        codes, scales, minima = random_codes(format, N, K)
        packed = pack_codes(codes, scales, minima, format, unit=0.25)
        assert packed.data.shape == (-(-N // 16), format.panel_bytes(K))
        assert packed.nbytes == format.matrix_bytes(N, K)
        torch.testing.assert_close(
            unpack(packed).double(), meant(format, codes, scales, minima, 0.25), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("format", [panels.FLOAT32, panels.BFLOAT16], ids=str)
def test_dense_formats_round_and_nothing_else(format: Format) -> None:
    for N, K in SIZES:
        matrix = torch.randn(N, K)
        dtype = torch.float32 if format.bits == 32 else torch.bfloat16
        assert torch.equal(unpack(pack(matrix, format)), matrix.to(dtype).float())
        assert torch.equal(unpack(pack(matrix.t().contiguous().t(), format)), matrix.to(dtype).float())


def plane_byte(bits: int, j: int, lane: int, i: int, codes: list[list[int]]) -> int:
    """One byte of a plane, straight from the sentences of docs/design/003-serving.md."""
    byte = 0
    match bits:
        case 4:
            byte = codes[lane][8 * j + i] | codes[lane][8 * j + 4 + i] << 4
        case 2:
            for b in range(4):
                byte |= codes[lane][16 * j + 4 * b + i] << 2 * b
        case 1:
            for b in range(8):
                byte |= codes[lane][32 * j + 4 * b + i] << b
        case 8:
            byte = codes[lane][4 * j + i]
    return byte


@pytest.mark.parametrize("format", [*QUANTISED, *ROTATED], ids=str)
def test_bytes_lie_as_the_design_page_says(format: Format) -> None:
    N, K = 18, format.group + 5
    codes, scales, minima = random_codes(format, N, K)
    data = pack_codes(codes, scales, minima, format).data
    table = torch.zeros(32, 2 * format.group, dtype=torch.uint8)
    table[:N, :K] = codes
    for panel, group in itertools.product(range(2), range(2)):
        stream = data[panel].tolist()
        at = group * format.group_bytes
        lanes = range(panel * 16, panel * 16 + 16)
        for numbers in (scales, minima):
            if numbers is not None:
                halves = torch.tensor(stream[at : at + 32], dtype=torch.uint8).view(torch.float16)
                assert halves.tolist() == [float(numbers[r, group]) if r < N else 0.0 for r in lanes]
                at += 32
        low = 0
        for width in {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}[format.bits]:
            part = [
                [
                    (int(q) >> low) & ((1 << width) - 1)
                    for q in table[r, group * format.group :][: format.group]
                ]
                for r in lanes
            ]
            # The second group has 5 weights, which take a block of 32.
            size = min(format.group, 32) if group else format.group
            for j in range(size * width // 32):
                for lane, i in itertools.product(range(16), range(4)):
                    assert stream[at + 4 * lane + i] == plane_byte(width, j, lane, i, part)
                at += 64
            low += width
        assert at == (len(stream) if group else format.group_bytes)


def test_dense_bytes_lie_as_the_design_page_says() -> None:
    matrix = torch.randn(18, 5)
    floats = torch.from_numpy(pack(matrix, panels.FLOAT32).data).view(torch.float32).view(2, 5, 16)
    assert torch.equal(floats[0], matrix[:16].t())
    assert torch.equal(floats[1, :, :2], matrix[16:].t())
    assert not floats[1, :, 2:].any()
    pairs = torch.from_numpy(pack(matrix, panels.BFLOAT16).data).view(torch.bfloat16).view(2, 3, 16, 2)
    assert torch.equal(pairs[0, 1, 7], matrix[7, 2:4].bfloat16())
    assert torch.equal(pairs[0, 2, 7, :1], matrix[7, 4:].bfloat16())
    assert not pairs[:, 2, :, 1].any()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(QUANTISED), st.integers(1, 70), st.integers(1, 300), st.data())
def test_any_rows_can_be_unpacked_alone(format: Format, N: int, K: int, data: st.DataObject) -> None:
    packed = pack_codes(*random_codes(format, N, K), format)
    begin = data.draw(st.integers(0, N))
    end = data.draw(st.integers(begin, N))
    assert torch.equal(unpack(packed, begin, end), unpack(packed)[begin:end])


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    format = quantised(6, 16)
    numbers = random_codes(format, 100, 48)
    whole = pack_codes(*numbers, format)
    dense = pack(torch.arange(4800.0).view(100, 48), panels.FLOAT32)
    expected = unpack(whole), unpack(dense)
    monkeypatch.setattr("hasten.ops.panels.reference._CHUNK", 1)
    assert np.array_equal(pack_codes(*numbers, format).data, whole.data)
    assert np.array_equal(pack(torch.arange(4800.0).view(100, 48), panels.FLOAT32).data, dense.data)
    assert torch.equal(unpack(whole), expected[0])
    assert torch.equal(unpack(dense), expected[1])
    assert torch.equal(unpack(whole, 17, 83), expected[0][17:83])


def test_linear_is_the_product_with_the_unpacked_matrix() -> None:
    format = quantised(4, minima=True)
    packed = pack_codes(*random_codes(format, 19, 40), format)
    x, bias = torch.randn(2, 3, 40), torch.randn(19)
    torch.testing.assert_close(linear(x, packed, bias), x @ unpack(packed).t() + bias)


def test_names_read_back() -> None:
    for format in [*QUANTISED, *ROTATED, panels.FLOAT32, panels.BFLOAT16]:
        assert named(format.name) == format
    assert named("int4r") == named("int4g128r") == Format("rotated", 4, 128, 8)
    assert named("int3mr") == rotated(3, minima=True)
    assert named("int8") == Format("quantised", 8, 32, 128)
    assert named("int4") == Format("quantised", 4, 32, 8)
    assert named("q6_k") == GGUF["Q6_K"] == Format("quantised", 6, 16, 32)
    assert named("int4").bytes_per_weight * 8 == 4.5
    assert named("int4m").bytes_per_weight * 8 == 5.0
    assert named("bfloat16").bytes_per_weight == 2
    assert named("int4r").panel_bytes(576) == 16 * (576 // 2 + 5 * 2)
    assert named("int4g64").panel_bytes(70) == 16 * (96 // 2 + 2 * 2)
    assert (panels.FLOAT32.code, panels.BFLOAT16.code, named("int4").code) == (0, 1, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: named("int7"),
        lambda: named("int4g48"),
        lambda: named("fp16"),
        lambda: named("int3g16"),
        lambda: named("int4g32r"),
        lambda: Format("turned", 4, 128),
        lambda: Format("quantised", 4, 32, 16),
        lambda: Format("bfloat16", 16, 32),
        lambda: Format("float16", 16, 1),
    ],
)
def test_formats_without_a_layout_are_refused(make) -> None:
    with pytest.raises(ConfigError, match=r"allowed|it has bits"):
        make()


def test_what_does_not_fit_is_refused() -> None:
    format = quantised(4)
    codes, scales, _ = random_codes(format, 4, 40)
    with pytest.raises(ShapeError, match="without minima"):
        pack_codes(codes, scales, None, quantised(4, minima=True))
    with pytest.raises(ShapeError, match=r"\[4, 2\]"):
        pack_codes(codes, scales[:, :1], None, format)
    with pytest.raises(ShapeError, match="use pack_codes"):
        pack(torch.zeros(2, 2), format)
    with pytest.raises(ShapeError, match="matrix"):
        pack(torch.zeros(2), panels.FLOAT32)
    with pytest.raises(ValueError, match="largest is 7"):
        pack_codes(codes.fill_(8), scales, None, quantised(3))
    with pytest.raises(ValueError, match="not finite in fp16"):
        pack_codes(codes, scales.float() * 1e9, None, format)
    with pytest.raises(ShapeError, match=r"uint8 \[1, "):
        Panels(np.zeros((1, 3), np.uint8), format, 4, 40)
    with pytest.raises(ShapeError, match="rows 3 to 5"):
        unpack(pack_codes(codes, scales, None, format), 3, 5)


def test_descriptions_are_json_and_restore() -> None:
    import json

    format = quantised(5, 64)
    packed = pack_codes(*random_codes(format, 20, 70), format, unit=0.5)
    description = json.loads(json.dumps(panels.describe(packed)))
    again = panels.restore(description, packed.data.reshape(-1).copy())
    assert torch.equal(unpack(again), unpack(packed))
    with pytest.raises(ShapeError, match="bytes"):
        panels.restore(description, packed.data[:1])
