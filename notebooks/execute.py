"""Run notebooks from top to bottom and keep their outputs: ``python notebooks/execute.py [01_quickstart.ipynb ...]``.

They run in an empty folder, in this Python and with this checkout of the package; they need what
``pip install 'dflash2[notebooks]'`` brings.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
#: The longest that a cell may take, in seconds.
CELL_TIMEOUT = 600


def execute(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of a run of its own.

    Args:
        path: of the notebook, which stays as it is.
        folder: where it runs.

    Raises:
        CellExecutionError: a cell raised.
    """
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    checkout = os.pathsep.join([str(FOLDER.resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    # No folder of kernels: "python3" is then this Python, whatever a user has installed under that name.
    manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_TIMEOUT,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    ).execute(env=os.environ | {"PYTHONPATH": checkout})
    notebook.metadata.language_info = {"name": "python"}  # without the version that happened to run it
    return notebook


def main() -> None:
    """Replace the kept outputs, or write copies."""
    import nbformat

    parser = argparse.ArgumentParser(description="Run notebooks and keep their outputs.")
    parser.add_argument("names", nargs="*", type=Path, help="notebooks (default: all)")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write copies there (default: in place)")
    args = parser.parse_args()
    for path in args.names or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            made = execute(path, Path(folder))
        place = path if args.to is None else args.to / path.name
        nbformat.write(made, place)
        print(f"{place.name}: {place.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
