"""Which model a word means: a preset of the planner, a file, a folder, or an id of the Hugging Face hub."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hasten.base.errors import InputError, nearest
from hasten.plan import model as models
from hasten.plan.model import ModelShape

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_shape(name: str) -> ModelShape:
    """The shape of a model; nothing but a `config.json` is ever fetched, and only where the cache lacks it.

    Raises:
        InputError: there is no such model, its config cannot be had, or it lacks a field.
    """
    if Path(name).expanduser().exists():
        return models.load(Path(name).expanduser())
    if name in models.presets():
        return models.preset(name)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise InputError(
        f"model {name!r} is neither a file, a preset nor a hub id (OWNER/NAME); "
        f"{nearest(name, models.presets())}"
    )


def _from_hub(name: str) -> ModelShape:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    stored = try_to_load_from_cache(name, "config.json")
    if not isinstance(stored, str):
        try:
            stored = hf_hub_download(name, "config.json")
        except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
            first = next(iter(str(error).splitlines()), "")
            raise InputError(
                f"model {name!r} is not in the cache and its config.json cannot be fetched ({first}); give "
                f"the file, "
                f"or a preset: {nearest(name.partition('/')[2].lower(), models.presets())}"
            ) from None
    try:
        config = json.loads(Path(stored).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{stored}: cannot be read as JSON: {error}") from None
    return models.from_config(config, name)
