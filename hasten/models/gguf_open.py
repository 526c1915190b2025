"""Opening a GGUF file as an ordinary transformers model and tokenizer: every weight dequantised, savable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from hasten.base.errors import InputError
from hasten.models.gguf_file import GgufFile
from hasten.models.gguf_map import names_in_file, settings_of, stored_order, undo_conversion
from hasten.models.skeleton import fill_buffers, meta_model

# Vocabularies whose digits are always tokens of their own: split before the byte-level pattern runs.
# transformers does not do it, and numbers after several spaces then come out differently. Names: llama.cpp's
# pre- tokenizers.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_STOP_TOKENS = ("eos", "eot", "eom")


def open_gguf(path: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model in `dtype`, in eval mode, and its tokenizer, from one GGUF file.

    Each parameter is filled exactly once; the output head is the embedding where the file says so.

    Raises:
        InputError: for a file that is damaged or that does not hold exactly the tensors of its architecture.
    """
    file = GgufFile(path)
    return _open_model(file, dtype), open_tokenizer(file)


def open_skeleton(file: GgufFile) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The file's model with its parameters on the meta device, and what to fill them with.

    Returns the model in eval mode, its buffers real (rotary frequencies) and its generation settings those of
    the file; for each parameter the file's name of it (one that shares its storage with another is listed
    once); and the transformers settings.

    Raises InputError as `open_gguf` does.
    """
    skeleton, settings = _skeleton(file)
    names = names_in_file(
        file, [name for name, _ in skeleton.named_parameters()], skeleton.config.num_hidden_layers
    )
    for name, parameter in skeleton.named_parameters():
        stored = file.tensors[names[name]]
        turned = (
            len(stored.shape) == 2
            and stored_order(stored.name, stored.shape[0], file.architecture, settings)[1]
        )
        shape = tuple(reversed(stored.shape)) if turned else stored.shape
        if tuple(parameter.shape) != shape:
            raise InputError(
                f"{file.path}: tensor {stored.name!r} has shape {shape}; "
                f"the model needs {tuple(parameter.shape)}"
            )
    fill_buffers(skeleton)
    _set_generation(file, skeleton)
    return skeleton.eval(), names, settings


def _skeleton(file: GgufFile) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = settings_of(file)
    try:
        config = AutoConfig.for_model(**settings)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{file.path}: its metadata makes no {settings['model_type']} model: {error}"
        ) from error
    skeleton = meta_model(config, AutoModelForCausalLM)
    config.architectures = [type(skeleton).__name__]
    return skeleton, settings


def _open_model(file: GgufFile, dtype: torch.dtype) -> Any:
    skeleton, settings = _skeleton(file)
    config = skeleton.config
    # Parameters that share their storage with another are listed once.
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    names = names_in_file(file, list(shapes), config.num_hidden_layers)
    weights = {
        name: read_tensor(file, stored, shapes[name], settings, dtype) for name, stored in names.items()
    }
    model, loading = type(skeleton).from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[problem]:
            raise InputError(f"{file.path}: {problem.replace('_', ' ')} {sorted(loading[problem])[:5]}")
    _set_generation(file, model)
    return model.eval()


def read_tensor(
    file: GgufFile, name: str, shape: tuple[int, ...], settings: dict[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """A stored tensor dequantised, as transformers' parameter of that shape; `name` is the file's.

    Raises InputError where its shape is another.
    """
    array = undo_conversion(name, file.read(name), file.architecture, settings)
    if array.shape != shape:
        raise InputError(f"{file.path}: tensor {name!r} has shape {array.shape}; the model needs {shape}")
    if not (array.flags.writeable and array.flags.c_contiguous):
        array = np.array(array, order="C")
    return torch.from_numpy(array).to(dtype)


def _set_generation(file: GgufFile, model: Any) -> None:
    from transformers import GenerationConfig

    generation = GenerationConfig.from_model_config(model.config)
    stops = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _STOP_TOKENS]
    known = list(dict.fromkeys(token for token in stops if token is not None))
    if len(known) > 1:
        generation.eos_token_id = known
    model.generation_config = generation


def open_tokenizer(file: GgufFile) -> Any:
    """The tokenizer that the file's metadata describes, as a transformers tokenizer.

    Raises InputError where there is none or it is damaged.
    """
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    if not file.metadata.get("tokenizer.ggml.tokens"):
        raise InputError(f"{file.path}: the metadata has no tokenizer")
    architecture, vocabulary, settings = get_gguf_tokenizer(str(file.path))
    try:
        backend, extra = convert_gguf_tokenizer(architecture, vocabulary)
    except Exception as error:  # the tokenizers library raises nothing narrower for a damaged vocabulary
        raise InputError(f"{file.path}: its tokenizer cannot be built: {error}") from error
    if file.metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    length = file.metadata.get(f"{file.architecture}.context_length")
    if length:
        settings["model_max_length"] = length
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **extra)
