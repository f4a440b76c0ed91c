"""A folder of small photos."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pictures import picture
from tests.support.pruning_worker import backbone  # noqa: F401


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 images in a folder and a folder inside it."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "inner").mkdir()
    for number in range(14):
        picture(number % 6, number).save(folder / ("inner" if number % 3 == 0 else "") / f"{number:02d}.png")
    (folder / "notes.txt").write_text("not an image")
    return folder
