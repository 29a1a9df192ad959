"""The notebooks run top to bottom, and what is committed of them is what GitHub shows.

After a change to one: `jupyter execute --inplace experiments/notebooks/NAME.ipynb`, without a GPU.
"""

import os
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parents[2] / "experiments/notebooks"
NAMES = ["1_single_techniques", "2_write_a_kernel", "3_plan_a_run"]
SECONDS = 600  # for a cell, on a busy machine; all cells of one take about a minute
MOST_BYTES = 400_000
# A path of somebody's machine, in text or in a traceback.
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?!/)[\w.~-]+/[\w.~-]|\b[A-Z]:\\\\")


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_outputs(notebook):
    """Every cell ran; none failed or warned; a picture opens it."""
    for number, cell in enumerate(code(notebook), 1):
        assert cell.execution_count == number, f"not run from top to bottom:\n{cell.source}"
        for output in cell.outputs:
            assert output.output_type != "error", f"{cell.source}\n{output}"
            assert output.get("name") != "stderr", f"{cell.source}\n{output.text}"
    opening = [output for cell in code(notebook)[:2] for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in opening)


def test_there_are_these_and_no_others():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed(name):
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < MOST_BYTES
    check_outputs(notebook)
    texts = [cell.source for cell in notebook.cells]
    texts += [str(output) for cell in code(notebook) for output in cell.outputs]
    without_pictures = [re.sub(r"'image/png': '[^']*'", "", text) for text in texts]
    assert [found[0] for text in without_pictures if (found := ABSOLUTE.search(text))] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/home/me/x.py:3", True),
        ('File "/tmp/ipykernel_1/2.py"', True),
        ("see ../../README.md, jaxaccel/nn.py, https://a.org/b/c, GiB / step", False),
    ],
)
def test_absolute_paths_are_seen(text, found):
    assert bool(ABSOLUTE.search(text)) == found


@pytest.mark.target
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    # Or the kernel builds matplotlib's cache of fonts, and where that takes long says so.
    import matplotlib.font_manager  # noqa: F401

    shutil.copy(FOLDER / f"{name}.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    # No settings of this user's, nor another kernel of the name python3 than this Python.
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    # What a notebook needs it sets itself: not what conftest has set for this process.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTEST_"))}
    if name == "1_single_techniques":  # small models are trained, and compiled for that
        env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=SECONDS, resources=where)
    try:
        client.execute(env=env)
    except CellExecutionError as error:  # its text is the cell and the traceback
        pytest.fail(str(error), pytrace=False)
    check_outputs(notebook)
