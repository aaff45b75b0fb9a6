"""The notebook runs, and its stored texts are those of the current code. Plots are not stored."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import nbclient
import nbformat
import pytest
from pages import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def printed(notebook: Any) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"]


def pictures(notebook: Any) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's client
def test_notebook_output_matches_stored_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stored = nbformat.read(NOTEBOOK, as_version=4)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert pictures(notebook) == 3
    assert pictures(stored) == 0  # their bytes differ between runs
    assert printed(notebook) == printed(stored)


def test_notebook_has_no_machine_paths_or_tracebacks() -> None:
    text = NOTEBOOK.read_text()
    cells = json.loads(text)["cells"]
    assert not any(path in text for path in (str(Path.home()), str(ROOT), gettempdir()))
    assert not any("traceback" in output for cell in cells for output in cell.get("outputs", []))
