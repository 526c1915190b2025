"""What several tests of the bench work on."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"document {number} says: " + chr(97 + number) * (40 + number))
    return folder
