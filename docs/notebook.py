"""Run examples/notebook.ipynb in a Jupyter kernel and keep what it prints: the site and GitHub show it so.

    python docs/notebook.py [FILE.ipynb]

It needs nbclient and ipykernel (the extra ``dev``), and takes a minute of one core. The notebook runs in an empty
folder, with one thread. What goes to stderr is left out: warnings of other packages, with their paths.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples/notebook.ipynb"


def executed(path: Path, seconds: int = 600) -> Any:
    """The notebook with the outputs of running it now. Raises CellExecutionError where a cell fails or takes longer."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(NOTEBOOK.parents[1])}
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook, timeout=seconds, resources=where, record_timing=False, coalesce_streams=True
        )  # fmt: skip
        client.execute(env=environment)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}  # without the version of who ran it
    return notebook


def printed(notebook: Any) -> dict[str, str]:
    """What each cell of code has printed, by the cell's id."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {
        cell.id: "".join(one.text for one in cell.outputs if one.output_type == "stream")
        for cell in cells
    }


def main() -> None:
    """Run the notebook and write it with its outputs."""
    import nbformat

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    nbformat.write(executed(path), path)
    print(path)


if __name__ == "__main__":
    main()
