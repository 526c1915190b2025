"""`open_model`: one call that opens what people call a model, as an ordinary transformers model and its
tokenizer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hasten.base.cache import cache_folder
from hasten.base.errors import InputError, first_line, nearest
from hasten.models.bars import late_bars
from hasten.models.gguf_open import open_gguf
from hasten.models.presets import PRESETS, fetch
from hasten.models.skeleton import fill_buffers, meta_model

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Opened(NamedTuple):
    """A transformers model in eval mode, and its tokenizer; None where a folder holds no tokenizer."""

    model: Any
    tokenizer: Any


def open_model(
    path_or_id: str | Path, *, dtype: torch.dtype = torch.float32, cache_dir: str | Path | None = None
) -> Opened:
    """Opens a GGUF file, a Hugging Face folder, a preset (`smollm2-135m`) or a hub id.

    Args:
        path_or_id: what to open; a path that exists comes first, then presets, then the hub.
        dtype: of the weights. Quantised files are dequantised into it.
        cache_dir: where presets (and, if given, hub files) are kept; else `HASTEN_CACHE_DIR`, else the user's
            cache. Hub files are otherwise kept in Hugging Face's own cache.

    Raises:
        InputError: nothing by that name, a damaged or incomplete model, or an architecture that cannot be
        opened.
    """
    try:
        with late_bars():
            return _open(path_or_id, dtype, cache_dir)
    except OSError as error:
        # No permission, a name that is too long, an interrupted mount.
        raise InputError(f"cannot open {path_or_id}: {error.strerror or error}") from error


def folder_skeleton(folder: Path) -> Any:
    """The causal model of a Hugging Face folder in eval mode: parameters on the meta device, buffers real.

    Raises InputError for a folder whose configuration makes no such model.
    """
    import json

    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(folder)
        model = meta_model(config, AutoModelForCausalLM)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise InputError(f"cannot open {folder}: {first_line(error)}") from error
    fill_buffers(model)
    return model.eval()


def open_folder_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder, or None where it holds none.

    Raises InputError for a damaged one.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot open the tokenizer in {folder}: {first_line(error)}") from error


def _open(path_or_id: str | Path, dtype: torch.dtype, cache_dir: str | Path | None) -> Opened:
    name = str(path_or_id)
    path = Path(path_or_id).expanduser()
    if path.is_file():
        return Opened(*open_gguf(path, dtype))
    if path.is_dir():
        return _open_folder(path, dtype)
    if name in PRESETS:
        return Opened(*open_gguf(fetch(name, PRESETS[name], cache_folder(cache_dir).value), dtype))
    if not _HUB_ID.fullmatch(name) or path.suffix in (".gguf", ".safetensors"):
        raise InputError(f"no such file or folder: {name}")
    try:
        return _open_pretrained(name, dtype, cache_dir, tokenizer=True)
    except InputError as error:
        raise InputError(
            f"{name!r} is no file, no folder and no preset ({nearest(name, PRESETS)}), "
            f"and the Hugging Face hub did not give it: {first_line(error.__cause__ or error)}"
        ) from error


def _open_folder(folder: Path, dtype: torch.dtype) -> Opened:
    if not (folder / "config.json").is_file():
        files = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; give the file itself: {folder / files[0]}" if files else ""
        raise InputError(f"folder {folder} has no config.json, so it is not a Hugging Face model{hint}")
    return _open_pretrained(folder, dtype, None, any((folder / name).is_file() for name in _TOKENIZER_FILES))


def _open_pretrained(
    source: str | Path, dtype: torch.dtype, cache_dir: str | Path | None, tokenizer: bool
) -> Opened:
    import json

    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    where = {"cache_dir": cache_dir} if cache_dir is not None else {}
    try:
        config = AutoConfig.from_pretrained(source, **where)
        masked = any(name.endswith("ForMaskedLM") for name in config.architectures or ())
        kind: Any = AutoModelForMaskedLM if masked else AutoModelForCausalLM
        model, loading = kind.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, **where
        )
        words = AutoTokenizer.from_pretrained(source, **where) if tokenizer else None
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, json.JSONDecodeError) as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"cannot open {source}: {text[0]}") from error
    if loading["missing_keys"]:
        raise InputError(f"{source} lacks the weights {', '.join(sorted(loading['missing_keys'])[:5])}")
    return Opened(model, words)
