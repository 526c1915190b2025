"""GGUF files: what is opened is what was written, and damage is named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_writing import ARCHITECTURES, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hasten.base.errors import InputError
from hasten.models import open_model, tiny_model
from hasten.models.gguf_file import GgufFile
from hasten.models.gguf_map import _LLAMA3, settings_of

IDS = torch.arange(2 * 70).reshape(2, 70) % 250 + 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_opens_every_architecture_with_equal_weights_and_logits(architecture: str, tmp_path: Path) -> None:
    family, overrides = ARCHITECTURES[architecture]
    original = tiny_model(family, **overrides).eval()
    write_gguf(tmp_path / "m.gguf", architecture, original)
    model, tokenizer = open_model(tmp_path / "m.gguf")
    assert type(model) is type(original)
    assert not model.training
    for name, value in original.state_dict().items():
        # Gemma's norms went through (w + 1) - 1 in fp32.
        torch.testing.assert_close(
            model.state_dict()[name], value, rtol=0, atol=2e-7 if "gemma" in family else 0
        )
    torch.testing.assert_close(model(IDS).logits, original(IDS).logits, rtol=1e-5, atol=1e-6)
    assert all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    tied = original.config.tie_word_embeddings
    heads = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    assert (heads[0].data_ptr() == heads[1].data_ptr()) is tied
    assert "quantization_config" not in model.config.to_dict()
    assert tokenizer.decode(tokenizer("ab  12").input_ids) == "ab  12"


def test_saved_folder_gives_the_same_model(tiny_gguf: tuple[Path, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, tokenizer = open_model(tiny_gguf[0])
    model.save_pretrained(tmp_path)
    assert open_model(tmp_path).tokenizer is None
    tokenizer.save_pretrained(tmp_path)
    again = open_model(tmp_path)
    expected = model(IDS).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(IDS).logits, expected)
    assert torch.equal(again.model(IDS).logits, expected)
    assert again.model.config.architectures == ["LlamaForCausalLM"]
    assert again.tokenizer.chat_template == tokenizer.chat_template
    assert again.tokenizer("a  1").input_ids == tokenizer("a  1").input_ids


def test_agrees_with_the_loader_of_transformers(tiny_gguf: tuple[Path, Any]) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        tiny_gguf[0].parent, gguf_file=tiny_gguf[0].name, dtype=torch.float32
    )
    ours = open_model(tiny_gguf[0]).model
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert torch.equal(ours(IDS).logits, theirs.eval()(IDS).logits)


def test_dtype_and_special_tokens(tiny_gguf: tuple[Path, Any]) -> None:
    model, tokenizer = open_model(tiny_gguf[0], dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, None)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer("</s>a").input_ids[0] == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"
    assert tokenizer.model_max_length == model.config.max_position_embeddings


def test_digits_are_split_before_spaces(tiny_gguf: tuple[Path, Any]) -> None:
    tokenizer = open_model(tiny_gguf[0]).tokenizer
    # Three spaces before a digit: the two that merge are the first two, and the third stays off the digit.
    assert tokenizer.convert_ids_to_tokens(tokenizer("   12").input_ids)[-2:] == ["1", "2"]
    assert tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   12")[-3:] == [
        ("ĠĠĠ", (1, 4)), ("1", (4, 5)), ("2", (5, 6)),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_quantised_matrices(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    original = tiny_model("qwen2")
    write_gguf(tmp_path / "q.gguf", "qwen2", original, kind=number)
    opened = open_model(tmp_path / "q.gguf").model.state_dict()
    for name, value in original.state_dict().items():
        expected = value.numpy()
        if value.dim() == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, number), number)
        assert torch.equal(opened[name], torch.tensor(np.asarray(expected, np.float32))), name


@pytest.mark.parametrize(("kind", "scales"), [("Q4_K", (0, 2)), ("Q5_K", (0, 2)), ("Q6_K", (208,))])
def test_k_quants_agree_with_an_independent_decoder(
    kind: str, scales: tuple[int, ...], tmp_path: Path
) -> None:
    from transformers.integrations.gguf.dequant import dequantize

    number = gguf.GGMLQuantizationType[kind]
    block_bytes = gguf.GGML_QUANT_SIZES[number][1]
    raw = np.random.default_rng(0).integers(0, 256, (6, 2, block_bytes), dtype=np.uint8)
    for begin in scales:
        raw[..., begin : begin + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", raw.reshape(6, -1), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GgufFile(tmp_path / "k.gguf").read("w")
    theirs = dequantize(torch.from_numpy(raw.reshape(6, -1)), int(number), torch.float32)
    assert ours.shape == (6, 512)
    torch.testing.assert_close(torch.tensor(ours), theirs.reshape(6, 512), rtol=1e-6, atol=1e-7)


def test_head_stored_twice_is_held_once(tmp_path: Path) -> None:
    original = tiny_model("llama", tie_word_embeddings=False)
    original.lm_head.weight.data.copy_(original.model.embed_tokens.weight)
    write_gguf(tmp_path / "m.gguf", "llama", original)
    model = open_model(tmp_path / "m.gguf").model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings


def test_llama3_scaling_is_recovered_from_its_table(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, **_LLAMA3}
    original = tiny_model("llama", rope_parameters=scaling, max_position_embeddings=131072)
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    divisors = (plain / original.model.rotary_emb.inv_freq).numpy()
    writer_model = original
    write_gguf(tmp_path / "m.gguf", "llama", writer_model)
    assert settings_of(GgufFile(tmp_path / "m.gguf"))["rope_parameters"]["rope_type"] == "default"
    _append_tensor(tmp_path / "m.gguf", "rope_freqs.weight", divisors)
    model = open_model(tmp_path / "m.gguf").model
    assert model.config.rope_parameters["factor"] == 32.0
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq)
    _append_tensor(
        tmp_path / "m.gguf", "rope_freqs.weight", divisors * np.linspace(1, 2, len(divisors)), replace=True
    )
    with pytest.raises(InputError, match="not a llama3 scaling"):
        open_model(tmp_path / "m.gguf")


def _append_tensor(path: Path, name: str, value: np.ndarray, replace: bool = False) -> None:
    """Rewrites `path` with one more tensor (or another value of it)."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    assert (name in tensors) is replace
    tensors[name] = (value.astype(np.float32), gguf.GGMLQuantizationType.F32)
    fields = [
        field for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general.architecture"))
    ]
    values = [(field.name, field.contents(), field.types[0], field.types[-1]) for field in fields]
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    for key, content, kind, item in values:
        writer.add_key_value(key, content, kind, item if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor_name, (data, kind) in tensors.items():
        writer.add_tensor(tensor_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), skip="blk.1.ffn_up.weight")
    with pytest.raises(InputError, match=r"blk\.1\.ffn_up\.weight.*missing"):
        open_model(tmp_path / "m.gguf")


def test_an_unexpected_tensor_is_named(tiny_gguf: tuple[Path, Any], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf[0].read_bytes())
    _append_tensor(path, "blk.0.ffn_sub_norm.weight", np.ones(64))
    with pytest.raises(InputError, match=r"unexpected tensors blk\.0\.ffn_sub_norm\.weight"):
        open_model(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"split.count": 3}, "one part of a split model"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "linaer"}, "did you mean 'linear'"),
    ],
)
def test_what_cannot_be_expressed_is_refused(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), extra=extra)
    with pytest.raises(InputError, match=message):
        open_model(tmp_path / "m.gguf")


def test_an_unknown_architecture_names_the_nearest(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen4")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"'qwen4' cannot be opened; allowed: .*did you mean 'qwen\d'"):
        open_model(tmp_path / "m.gguf")


def test_every_cut_is_refused(tiny_gguf: tuple[Path, Any], tmp_path: Path) -> None:
    whole = tiny_gguf[0].read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = sorted({0, 3, 4, 7, 23, 24, *np.linspace(25, len(whole) - 1, 60, dtype=int).tolist()})
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"cut off|not a GGUF file"):
            GgufFile(cut)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(4, 3000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_headers_never_crash(
    tiny_gguf: tuple[Path, Any], tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(tiny_gguf[0].read_bytes())
    for place, value in changes:
        data[place] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    try:
        file = GgufFile(path)
    except InputError:
        return
    assert all(tensor.begin + tensor.size_bytes <= len(data) for tensor in file.tensors.values())


def test_huge_counts_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    key = b"k"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path.write_bytes(header + struct.pack("<IIQ", 9, 8, 1 << 60))
    with pytest.raises(InputError, match="damaged"):
        GgufFile(path)
    path.write_bytes(header + struct.pack("<IIQ", 9, 4, 1 << 60))
    with pytest.raises(InputError, match="cut off"):
        GgufFile(path)
