"""The files of a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvquilt.evaluation.report.markdown import markdown
from kvquilt.evaluation.report.page import page
from kvquilt.evaluation.report.told import read_told
from kvquilt.files import write_atomically, writing


def write(folders: Sequence[Path], out: Path, most: int = 200) -> list[Path]:
    """Write ``report.html``, ``report.md`` and ``report.json`` into `out`; their paths.

    Args:
        most: items of each run that the page holds. The other two hold no question, document or answer.

    Raises:
        InputError: a folder holds no run, or none of its items is finished.
        IntegrityError: a folder is damaged.
        StoreUnavailableError: `out` cannot be written.
    """
    runs = [read_told(folder) for folder in folders]
    figures = [{"about": run.about, "config": run.config, **run.summary.as_dict()} for run in runs]
    made = {
        "report.html": page(runs, most),
        "report.md": markdown(runs),
        "report.json": json.dumps(figures, indent=1) + "\n",
    }
    with writing(out):
        for name, text in made.items():
            write_atomically(out / name, text.encode())
    return [out / name for name in made]
