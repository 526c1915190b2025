"""Where downloaded models are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hasten.base.errors import InputError
from hasten.base.facts import Fact


def cache_folder(argument: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Fact[Path]:
    """The cache folder and who chose it: `argument`, else `HASTEN_CACHE_DIR`, else the user's cache (XDG).

    The folder need not exist. Raises InputError if the name is taken by something that is not a folder.
    """
    environ = os.environ if environ is None else environ
    if argument is not None:
        chosen = Fact(Path(argument).expanduser(), "argument")
    elif text := environ.get("HASTEN_CACHE_DIR"):
        chosen = Fact(Path(text).expanduser(), "HASTEN_CACHE_DIR")
    elif text := environ.get("XDG_CACHE_HOME"):
        chosen = Fact(Path(text) / "hasten", "XDG_CACHE_HOME")
    else:
        chosen = Fact(Path.home() / ".cache" / "hasten", "default")
    if chosen.value.exists() and not chosen.value.is_dir():
        raise InputError(f"cache folder {chosen.value} (from {chosen.source}) is a file; give a folder")
    return chosen
