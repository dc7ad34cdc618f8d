#!/usr/bin/env python3
"""Keep a finished run's figures, and nothing that people wrote, under benchmarks/results.

    keep_result.py eval DIR TASK-MODEL        a folder of `kvquilt eval`: eval/TASK-MODEL.json and .md
    keep_result.py attention DIR TASK-MODEL   a folder of `kvquilt study attention`: attention-TASK-MODEL.json
    keep_result.py repair-budget DIR NAME     a folder of `kvquilt study repair-budget`: repair-budget-NAME.json

Then `make docs`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvquilt.errors import InputError, KvquiltError
from kvquilt.evaluation.report.told import read_told
from kvquilt.evaluation.report.writing import write
from kvquilt.evaluation.run.folder import EvaluationFolder
from kvquilt.evaluation.studies.attention_summary import summarise_attention
from kvquilt.evaluation.studies.repair_budget_figures import figures

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
LARGEST = 200_000  # bytes of a file that is kept


def keep_evaluation(folder: Path, name: str, results: Path = RESULTS) -> list[Path]:
    """Raises `InputError`: the run goes on."""
    told = read_told(folder)
    if len(told.items) < told.planned:
        raise InputError("folder", f"the run is not finished: {len(told.items)} of {told.planned} items", str(folder))
    kept = [results / "eval" / f"{name}.{ending}" for ending in ("json", "md")]
    kept[0].parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        write([folder], Path(place), most=0)
        for path in kept:
            path.write_bytes((Path(place) / f"report{path.suffix}").read_bytes())
    return kept


def keep_attention(folder: Path, name: str, results: Path = RESULTS) -> list[Path]:
    """With means over heads in the place of heads, if all of them take more than `LARGEST`.

    Raises:
        InputError: that is still too large: take fewer methods; the study goes on.
    """
    found = summarise_attention(folder).as_dict()
    items = len(EvaluationFolder(folder).read_items())
    for arm in found["arms"]:
        if arm["items"] + arm["refused"] < items:
            raise InputError(
                "folder", f"the study is not finished: {arm['method']} has not all {items} items", str(folder)
            )
    text = json.dumps(found) + "\n"
    if len(text) > LARGEST:
        text = json.dumps(by_layer(found)) + "\n"
    if len(text) > LARGEST:
        raise InputError("folder", f"its figures take more than {LARGEST} bytes", len(text))
    path = results / f"attention-{name}.json"
    path.write_text(text, encoding="utf-8")
    return [path]


def keep_repair_budget(folder: Path, name: str, results: Path = RESULTS) -> list[Path]:
    """Raises `InputError`: settings are not finished."""
    found = figures(folder)
    if found["unfinished"]:
        raise InputError("folder", f"the study is not finished: {', '.join(found['unfinished'])}", str(folder))
    path = results / f"repair-budget-{name}.json"
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return [path]


def by_layer(found: dict[str, Any]) -> dict[str, Any]:
    """The summary of a study with ``layers`` for ``heads``: means over a layer's heads that have a value."""
    arms = []
    for arm in found["arms"]:
        means = {name: [_mean(heads) for heads in layers] for name, layers in arm["heads"].items()}
        arms.append({**{key: value for key, value in arm.items() if key != "heads"}, "layers": means})
    return {**found, "arms": arms}


def _mean(heads: list[float | None]) -> float | None:
    known = [each for each in heads if each is not None]
    return float(f"{np.mean(known):.5g}") if known else None


def main(arguments: list[str]) -> int:
    kinds = {"eval": keep_evaluation, "attention": keep_attention, "repair-budget": keep_repair_budget}
    if len(arguments) != 3 or arguments[0] not in kinds:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        kept = kinds[arguments[0]](Path(arguments[1]), arguments[2])
    except KvquiltError as error:
        print(error, file=sys.stderr)
        return 1
    print(*kept, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
