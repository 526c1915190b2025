"""Where a model lies, before anything of it is opened. No torch."""

from __future__ import annotations

from pathlib import Path

from hasten.base.cache import cache_folder
from hasten.models.presets import PRESETS, fetch


def locate(path_or_id: str | Path, cache_dir: str | Path | None = None) -> Path | None:
    """The file or folder that `path_or_id` names; a preset is fetched. None for a hub id and for nothing.

    Raises InputError as `open_model` does where a preset cannot be fetched.
    """
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    name = str(path_or_id)
    return fetch(name, PRESETS[name], cache_folder(cache_dir).value) if name in PRESETS else None
