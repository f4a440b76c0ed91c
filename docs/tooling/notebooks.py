"""Runs the notebooks of examples/ and saves them with their outputs, pictures with few colours.

python docs/tooling/notebooks.py
"""

from __future__ import annotations

import base64
import tempfile
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run in this folder, where its files are written."""
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, resources=place, record_timing=False, coalesce_streams=True).execute()
    return notebook


def shrink(png: str) -> str:
    """A PNG file in base64 with at most 256 colours."""
    small = BytesIO()
    with Image.open(BytesIO(base64.b64decode(png))) as image:
        image.convert("RGB").quantize(256, kmeans=1).save(small, format="png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = run(path, Path(folder))
        notebook.metadata["language_info"] = {"name": "python"}  # without the version of this machine
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            cell["outputs"] = [o for o in cell.get("outputs", []) if o.get("name") != "stderr"]  # warnings of this machine
            for output in cell["outputs"]:
                data = output.get("data", {})
                data.pop("image/jpeg", None)  # Pillow gives both
                if "image/png" in data:
                    data["image/png"] = shrink(data["image/png"])
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
