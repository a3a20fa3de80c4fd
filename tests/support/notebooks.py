"""Runs the notebooks of `notebooks/`, and reads the outputs of their cells."""

import base64
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
JUPYTER_FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "TMPDIR")
"""Variables of the folders that Jupyter and IPython write, by default in the user's home."""
PNG = b"\x89PNG\r\n\x1a\n"


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def execute(notebook: nbformat.NotebookNode, more: str = "") -> nbformat.NotebookNode:
    """Run a notebook, with `more` as an additional last cell."""
    if more:
        notebook.cells.append(nbformat.v4.new_code_cell(more))
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook


def cell_with(notebook: nbformat.NotebookNode, source: str) -> nbformat.NotebookNode:
    """Return the one code cell that contains `source`."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    return cell


def outputs(notebook: nbformat.NotebookNode, source: str, kind: str) -> list:
    """Return the outputs of type `kind` from the one cell that contains `source`."""
    return [output for output in cell_with(notebook, source).outputs if output.output_type == kind]


def shown(notebook: nbformat.NotebookNode, source: str, mime: str = "text/plain") -> str:
    """Return the value of the one cell that contains `source`."""
    (value,) = outputs(notebook, source, "execute_result")
    return value["data"][mime]


def printed(notebook: nbformat.NotebookNode, source: str) -> str:
    return "".join(output.text for output in outputs(notebook, source, "stream") if output.name == "stdout")


def drawn(notebook: nbformat.NotebookNode, source: str) -> bytes:
    """Return the only picture of a cell."""
    pictures = outputs(notebook, source, "execute_result") + outputs(notebook, source, "display_data")
    (picture,) = [output["data"]["image/png"] for output in pictures if "image/png" in output["data"]]
    return base64.b64decode(picture)
