"""Sources of weights: every GGUF kind packed as it is stored, small memory, one storage for tied matrices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hasten.base.errors import InputError
from hasten.models import open_model, tiny_model
from hasten.models.gguf_file import GgufFile
from hasten.models.gguf_panels import gguf_panels
from hasten.ops.panels import BFLOAT16, FLOAT32, GGUF, named
from hasten.ops.panels.reference import unpack
from hasten.serve.program import Weight
from hasten.serve.quantise import quantise
from hasten.serve.weights import FolderSource, GgufSource, ModelSource, open_source

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from gguf_writing import ARCHITECTURES, write_gguf

IDS = torch.arange(40).reshape(1, 40) + 3
PRODUCTS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Any bytes are blocks, as long as the fp16 factors are numbers of ordinary size."""
    number = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(len(kind) + rows)
    raw = rng.integers(0, 256, (rows, blocks, gguf.GGML_QUANT_SIZES[number][1]), dtype=np.uint8)
    places = PRODUCTS.get(kind, (0, 2) if kind.endswith("_1") else (0,))
    for place in places:
        factors = (rng.standard_normal((rows, blocks)) * 10.0 ** rng.integers(-3, 2, (rows, blocks))).astype(
            np.float16
        )
        raw[..., place : place + 2] = factors[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def write_tensor(path: Path, kind: str, raw: np.ndarray) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("kind", GGUF)
def test_blocks_become_panels_of_the_same_values(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = random_blocks(kind, 37, 3)
    file = write_tensor(tmp_path / "m.gguf", kind, raw)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    panels = gguf_panels(file, "w")
    assert panels.format == GGUF[kind]
    if kind in PRODUCTS:
        # Scales and minima are products that fp16 rounds; 2^-11 of the largest term each.
        group = GGUF[kind].group
        largest = (
            expected.view(37, -1, group).abs().amax(-1, keepdim=True).expand(-1, -1, group).reshape(37, -1)
        )
        spread = largest * (3 if GGUF[kind].minima else 1) + 64 * expected.abs().mean() * 2**-14
        assert bool(((unpack(panels) - expected).abs() <= spread * 2.0**-10).all())
    else:
        assert torch.equal(unpack(panels), expected)
    # Rows in another order, a part of them, and a part of the columns; small chunks.
    order = np.random.default_rng(0).permutation(37)
    group = GGUF[kind].group
    monkeypatch.setattr("hasten.models.gguf_panels._CHUNK", 1)
    part = gguf_panels(file, "w", order, rows=(2, 35), columns=(group, 2 * group + 7))
    assert torch.equal(unpack(part), unpack(panels)[order][2:35, group : 2 * group + 7])
    assert part.unit == panels.unit
    with pytest.raises(InputError, match="columns of 'w' from 1"):
        gguf_panels(file, "w", columns=(1, 9))


def test_bytes_of_each_kind_stay_within_the_bound() -> None:
    for kind, format in GGUF.items():
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert format.bytes_per_weight <= 1.13 * block_bytes / per_block


def test_a_damaged_scale_is_named(tmp_path: Path) -> None:
    raw = random_blocks("Q4_0", 16, 2)
    raw[3, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(InputError, match="'w' is damaged"):
        gguf_panels(write_tensor(tmp_path / "m.gguf", "Q4_0", raw), "w")


def check_same_model(source: Any, model: Any, tolerance: float = 0.0) -> None:
    skeleton = source.skeleton()
    assert type(skeleton) is type(model)
    assert not skeleton.training
    expected = dict(model.named_buffers())
    assert expected.keys() == dict(skeleton.named_buffers()).keys()
    for name, buffer in skeleton.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(source.dense(name), parameter.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_source_gives_what_open_model_gives(architecture: str, tmp_path: Path) -> None:
    family, overrides = ARCHITECTURES[architecture]
    # Rows of 64 are multiples of a block; intermediate 160 is as well.
    original = tiny_model(family, **overrides).eval()
    path = tmp_path / "m.gguf"
    write_gguf(path, architecture, original, kind=gguf.GGMLQuantizationType.Q8_0)
    source, model = GgufSource(path), open_model(path).model
    check_same_model(source, model)
    turned = architecture == "gpt2"
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            continue
        conv = turned and ".h." in name
        panels = source.panels(Weight(name, transposed=conv), None)
        assert panels.format == named("Q8_0")
        matrix = parameter.t() if conv else parameter
        assert torch.equal(unpack(panels), matrix.detach()), name
        rows = source.panels(Weight(name, transposed=conv, rows=(3, 20)), None)
        assert torch.equal(unpack(rows), matrix[3:20].detach()), name
        if conv:
            # The transpose of blocks is not blocks: rounded to bf16 instead.
            other = source.panels(Weight(name), None)
            assert other.format == BFLOAT16
            assert torch.equal(unpack(other), parameter.detach().bfloat16().float())
    with pytest.raises(InputError, match="no parameter 'lm'"):
        source.dense("lm")
    assert source.tokenizer()("ab  12").input_ids == open_model(path).tokenizer("ab  12").input_ids
    assert source.skeleton().generation_config.eos_token_id == model.generation_config.eos_token_id


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_stored_once(tied: bool, tmp_path: Path) -> None:
    original = tiny_model("llama", tie_word_embeddings=tied).eval()
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", original, kind=gguf.GGMLQuantizationType.Q4_1)
    for source in (GgufSource(path), ModelSource(original)):
        for format in (None, named("int4")):
            embedding = source.panels(Weight("model.embed_tokens.weight", role="embedding"), format)
            head = source.panels(Weight("lm_head.weight", role="head"), format)
            assert (embedding is head) is tied


def test_a_file_is_planned_as_its_open_model(tmp_path: Path) -> None:
    from hasten.serve.calibrate import calibrate
    from hasten.serve.plan import plan_bits

    path = tmp_path / "m.gguf"
    write_gguf(
        path, "gpt2", tiny_model("gpt2", n_inner=256, n_positions=64), kind=gguf.GGMLQuantizationType.Q4_1
    )
    model = open_model(path).model
    calibration = calibrate(model, [torch.arange(40)])
    plans = [plan_bits(source(calibration), 8.0) for source in (
        lambda found: GgufSource(path, found), lambda found: ModelSource(model, calibration=found)
    )]  # fmt: skip
    assert str(plans[0]) == str(plans[1])
    name = "transformer.h.1.mlp.c_fc.weight"
    weight = Weight(name, transposed=True)
    panels = [
        source.panels(weight, named("int3m"))
        for source in (GgufSource(path, calibration), ModelSource(model, calibration=calibration))
    ]
    assert np.array_equal(panels[0].data, panels[1].data)
    # Blocks of four bits with minima are found again without a loss.
    exact = GgufSource(path).panels(weight, named("int4m"))
    torch.testing.assert_close(unpack(exact), model.get_parameter(name).detach().t(), rtol=1e-3, atol=1e-6)


def test_model_source_formats_and_parts() -> None:
    model = tiny_model("gpt2").eval()
    source = ModelSource(model)
    name = "transformer.h.0.attn.c_attn.weight"
    weight = model.get_parameter(name).detach()
    check_same_model(source, model)
    assert source.panels(Weight(name), None).format == FLOAT32
    assert torch.equal(unpack(source.panels(Weight(name, transposed=True), None)), weight.t())
    part = Weight(name, transposed=True, rows=(64, 128), columns=(5, 60))
    assert torch.equal(unpack(source.panels(part, FLOAT32)), weight.t()[64:128, 5:60])
    expected = unpack(quantise(weight.t()[64:128, 5:60], named("int5")))
    assert torch.equal(unpack(source.panels(part, named("int5"))), expected)
    assert ModelSource(model.bfloat16()).panels(Weight(name), None).format == BFLOAT16
    for bad in (Weight(name, rows=(0, 65)), Weight(name, columns=(3, 3)), Weight("transformer.ln_f.weight")):
        with pytest.raises(InputError, match=r"rows 0 to 65 of 64|columns 3 to 3|is no matrix"):
            source.panels(bad, None)
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"c_attn.*not finite"):
        source.panels(Weight(name), named("int4"))


def test_folder_source(small_model_folder: Path, tmp_path: Path) -> None:
    source = FolderSource(small_model_folder)
    opened = open_model(small_model_folder)
    check_same_model(source, opened.model.eval())
    name = "model.layers.1.mlp.up_proj.weight"
    stored = source.panels(Weight(name), None)
    assert torch.equal(unpack(stored), opened.model.get_parameter(name).detach())
    assert source.panels(Weight("lm_head.weight"), BFLOAT16) is source.panels(
        Weight("model.embed_tokens.weight"), BFLOAT16
    )
    assert source.tokenizer()("ab").input_ids == opened.tokenizer("ab").input_ids
    assert isinstance(open_source(small_model_folder), FolderSource)
    # In several files, and without the name of the whole.
    opened.model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    check_same_model(FolderSource(tmp_path / "parts"), opened.model)
    opened.model.model.save_pretrained(tmp_path / "base")
    config = json.loads((small_model_folder / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    check_same_model(FolderSource(tmp_path / "base"), opened.model)
    (tmp_path / "parts" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "y"}}')
    with pytest.raises(InputError, match="stores no tensor"):
        FolderSource(tmp_path / "parts")
    with pytest.raises(InputError, match="neither"):
        FolderSource(tmp_path)


def test_fingerprints_follow_the_content(small_model_folder: Path, tmp_path: Path) -> None:
    model = tiny_model("llama")
    first = ModelSource(model).fingerprint
    assert ModelSource(tiny_model("llama")).fingerprint == first
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert ModelSource(model).fingerprint != first
    path = tmp_path / "m.bin"
    path.write_bytes(bytes(3_000_000))
    from hasten.serve.fingerprint import model_fingerprint

    times = path.stat().st_mtime_ns
    before = model_fingerprint(path)
    assert model_fingerprint(path) == before
    for place in (0, 2_999_999):
        changed = bytearray(3_000_000)
        changed[place] = 1
        path.write_bytes(changed)
        os.utime(path, ns=(times, times))
        assert model_fingerprint(path) != before
    path.write_bytes(bytes(3_000_000))
    os.utime(path, ns=(times, times + 1))
    assert model_fingerprint(path) != before
    assert model_fingerprint(small_model_folder) == FolderSource(small_model_folder).fingerprint
    with pytest.raises(InputError, match="cannot read"):
        model_fingerprint(tmp_path / "nothing")


_MEASURE = """
import json, sys
from pathlib import Path
import torch, psutil
import transformers.models.llama.modeling_llama
from hasten.serve.program import Weight
from hasten.serve.weights import GgufSource
from hasten.ops.panels import quantised
from hasten.ops.panels.reference import pack_codes, unpack

torch.set_num_threads(1)
lines = lambda: open("/proc/self/status")
status = lambda key: int(next(line for line in lines() if line.startswith(key)).split()[1]) * 1024
source = GgufSource(sys.argv[1])
names = [name for name, parameter in source.skeleton().named_parameters() if parameter.dim() == 2]
# Whatever a first use loads is there before the count begins.
source.panels(Weight(names[1]), None)
begin = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
held = [source.panels(Weight(name), None) for name in names]
small = [source.dense(name) for name, p in source.skeleton().named_parameters() if p.dim() == 1]
print(json.dumps({
    "rss": status("VmRSS") - begin, "peak": status("VmHWM") - begin,
    "bytes": sum(panels.nbytes for panels in held), "large": max(panels.nbytes for panels in held),
    "formats": sorted({panels.format.name for panels in held}),
}))
"""


class Shapes:
    """A model's configuration and parameters of zeros, which take no memory."""

    def __init__(self, **overrides: Any) -> None:
        with torch.device("meta"):
            self._model = tiny_model("llama", **overrides)
        self.config = self._model.config

    def named_parameters(self) -> Any:
        for name, parameter in self._model.named_parameters():
            yield name, torch.zeros(1).expand(parameter.shape)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc/self/clear_refs")
def test_memory_after_opening_stays_near_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "Q4_K"  # whose panels are the largest against the file

    def blocks(value: np.ndarray, number: int) -> np.ndarray:
        per_block, _ = gguf.GGML_QUANT_SIZES[number]
        return random_blocks(kind, value.shape[0], value.shape[1] // per_block)

    monkeypatch.setattr(gguf.quants, "quantize", blocks)
    path = tmp_path / "m.gguf"
    shapes = Shapes(hidden_size=768, intermediate_size=3072, vocab_size=16384, num_hidden_layers=8)
    write_gguf(path, "llama", shapes, kind=gguf.GGMLQuantizationType[kind])
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    size = path.stat().st_size
    assert got["formats"] == [GGUF[kind].name]
    assert got["bytes"] <= 1.13 * size
    assert got["rss"] <= 1.3 * size, got
    # While opening: what is kept, the blocks of one tensor, and the numbers of a chunk of it.
    assert got["peak"] <= 1.3 * size + 10_000_000, got
