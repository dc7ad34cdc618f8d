"""`kvquilt report`: a page that people read, from the folders of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvquilt.cli.common import Json, echo_json
from kvquilt.cli.measuring import told_by_option
from kvquilt.errors import InputError


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Folders of runs of `kvquilt eval`, also those that a study of the repair budget has made.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the files go; by default the folder, if there is one.")
    ] = None,
    items: Annotated[int, typer.Option(min=0, metavar="N", help="Items of each run that can be browsed.")] = 200,
    json_output: Json = False,
) -> None:
    """Write report.html, one page that needs no network, report.md and report.json from runs, without a model.

    A run that goes on is told as far as it is. The page holds questions, documents and answers of the items to browse;
    the other two hold none of these.
    """
    if out is None and len(folders) > 1:
        raise InputError("--out", "needed for more than one run: --out DIR")
    from kvquilt.evaluation.report.writing import write

    with told_by_option(folder="DIR"):
        written = write(folders, folders[0] if out is None else out, items)
    if json_output:
        echo_json({"files": [str(path) for path in written]})
    else:
        for path in written:
            typer.echo(str(path))
