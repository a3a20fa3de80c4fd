"""The notebooks run from top to bottom, and what their cells show is right."""

import ast
import base64
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "notebooks" / "digits.ipynb"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory):
    """Jupyter's and IPython's folders out of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.fixture(scope="module")
def digits(jupyter):
    return execute(nbformat.read(DIGITS, as_version=4))


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook


def shown(notebook: nbformat.NotebookNode, source: str, mime: str = "text/plain") -> str:
    """What the one cell that holds `source` shows as its value."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    (value,) = [output["data"][mime] for output in cell.outputs if output.output_type == "execute_result"]
    return value


def printed(notebook: nbformat.NotebookNode, source: str) -> str:
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def test_a_cell_that_fails_fails_the_test(jupyter):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(broken)


@pytest.mark.parametrize("path", sorted(DIGITS.parent.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


def test_digits_holds_out_every_seventh(digits):
    assert ast.literal_eval(shown(digits, "load_digits()\n")) == (1540, 257)


def test_digits_are_spread_over_four_devices(digits):
    """Each device takes its own sixteen rows of every batch."""
    _, *slices = printed(digits, "print(setup)").splitlines()
    assert [line.split("rows ")[1] for line in slices] == ["0:16", "16:32", "32:48", "48:64"]


def test_digits_are_learned(digits):
    figures = ast.literal_eval(shown(digits, "jaxddp.evaluate("))
    assert figures["count"] == 257
    assert figures["top1"] > 0.95
    assert figures["loss"] < 0.2


def test_digits_figures_agree(digits):
    """Three ways of measuring one state on one set."""
    top1 = ast.literal_eval(shown(digits, "jaxddp.evaluate("))["top1"]
    accuracy = ast.literal_eval(shown(digits, "topk_accuracy("))
    assert list(accuracy) == [1, 2, 3]
    assert accuracy[1] == pytest.approx(top1)
    assert top1 <= accuracy[2] <= accuracy[3] <= 1
    best = float(shown(digits, "argmax()").strip("'").split(": ")[1].rstrip("%"))
    assert best >= 100 * top1 - 0.05


@pytest.mark.parametrize("source", ["\nhistory", "show_predictions("])
def test_digits_draws_its_pictures(digits, source):
    assert base64.b64decode(shown(digits, source, "image/png")).startswith(PNG)


def test_digits_says_nothing_on_stderr(digits):
    loud = [
        output.text for cell in digits.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"
    ]
    assert loud == []
