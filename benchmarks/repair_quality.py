"""What every method costs in answers at every budget: invented biographies, full prefill is the truth.

Per arm (a method as the command line writes it): corpus micro-F1 of short answers, KL per answer token to full prefill
along its own answer, top-1 agreement, charged share of token-layers, and the ratio of times to the first token. Beside
them the control that needs no reuse at all: full prefill over only the documents that BM25 ranks best. One JSON line
per item; a run that was stopped continues where it stopped.

    python benchmarks/repair_quality.py --model PATH --lines LINES.jsonl --json OUT.json --cells 10-short:20 \
        --arms none retrieved-document epic:k=16 cacheblend:15% ...
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from biographies import items, shared_words

from kvquilt.bench import environment
from kvquilt.config import Settings
from kvquilt.engine import Engine
from kvquilt.errors import InputError
from kvquilt.fidelity import Spoken, compare, truth
from kvquilt.model.load import load_model
from kvquilt.placement import place_runs
from kvquilt.prompt import Document
from kvquilt.repair.presets import find_method
from kvquilt.retrieval import ranked_documents
from kvquilt.store import Store

_NEW = 16
_SYSTEM = "Answer the question from the documents with the bare value only: no sentence, no other word."
_FEWER = (1, 2, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", help="how the model is called in the result")
    parser.add_argument("--helper", help="a second, small model for cacheclip")
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", default=["10-short:20"], metavar="DOCUMENTS-LENGTH:QUESTIONS")
    parser.add_argument("--arms", nargs="+", required=True, metavar="METHOD")
    parser.add_argument("--split", default="test", choices=("train", "test"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = Settings.resolve()[0]
    model = load_model(options.model, threads=options.threads, settings=settings)
    helper = load_model(options.helper, threads=options.threads, settings=settings) if options.helper else None
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(model, Store.open(folder, 4 << 30, 20 << 30), settings, system=_SYSTEM, helper=helper) as engine,
    ):
        for entry in options.cells:
            cell, count = entry.split(":")
            documents, length = cell.split("-")
            for n, item in enumerate(items(options.split, int(count), int(documents), options.seed)):
                known = next((r["arms"] for r in _lines(options.lines) if (r["cell"], r["item"]) == (cell, n)), {})
                arms = [arm for arm in options.arms if arm not in known]
                if not arms:
                    continue
                record = {"cell": cell, "item": n, **_measure(engine, item, length, arms, bool(known))}
                with options.lines.open("a") as out:
                    out.write(json.dumps(record) + "\n")
                print(f"{cell}: item {n + 1} of {count}", flush=True)
    result = {
        **environment(),
        "model": options.model_name or Path(options.model).name,
        "helper": Path(options.helper).name if options.helper else None,
        "seed": options.seed,
        "split": options.split,
        "cells": _summary(_lines(options.lines)),
    }
    result["command"] = re.sub(r"\S*/(?=\S)", "", result["command"])
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """One record per item: a later line adds the arms that an earlier one lacks."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        first = found.setdefault((record["cell"], record["item"]), record)
        first["arms"] = record["arms"] | first["arms"]
    return list(found.values())


def _measure(engine: Engine, item: Any, length: str, arms: list[str], again: bool) -> dict[str, Any]:
    """Every arm on one item; full prefill in the given order is the truth of them all.

    Args:
        again: the arms join others of an earlier run, which has the controls.
    """
    documents = [Document(getattr(p, length), id=p.name) for p in item.people]
    runs = engine.prompt(item.question, documents).runs(engine.model.tokenizer)
    ranking = ranked_documents(item.question, documents)
    true = truth(engine, place_runs(runs), None, _NEW)
    full = _score(engine, true, item.answer)
    out: dict[str, Any] = {"full": full}
    for top in () if again else (n for n in _FEWER if n < len(documents)):
        few = [d for n, d in enumerate(documents) if n in ranking[:top]]
        placement = place_runs(engine.prompt(item.question, few).runs(engine.model.tokenizer))
        out[f"full prefill of the best {top}"] = _score(engine, truth(engine, placement, None, _NEW), item.answer)
    for arm in arms:
        method = find_method(arm)
        engine.compile(documents, gate=False, method=arm)
        placement = place_runs(runs, method.order, ranking if method.needs_ranking else (), method.moved)
        try:
            close = compare(engine, placement, method, None, true, own=_NEW)
        except InputError as error:
            out[arm] = {"refused": error.field}
            continue
        spent = close.spoken.ledger.spending
        out[arm] = {
            **_score(engine, close.spoken, item.answer),
            "kl": [round(float(v), 6) for v in close.kl],
            "top1": [int(v) for v in close.agree],
            "charged": round(spent.charged_share, 5) if spent else 0.0,
            "nominal": round(spent.nominal_share, 5) if spent else 0.0,
            "ratio": round(full["first_token_s"] / close.spoken.ledger.reading_seconds, 4),
        }
    return {
        "answer": item.answer,
        "tokens": place_runs(runs).tokens,
        "bm25_hit": ranking[0] == item.gold,
        "arms": out,
    }


def _score(engine: Engine, spoken: Spoken, gold: str) -> dict[str, Any]:
    stop = engine.model.stop_ids
    text = engine.model.tokenizer.decode([i for i in spoken.ids if i not in stop], skip_special_tokens=True)
    return {
        "text": text,
        **shared_words(text, gold),
        "first_token_s": round(spoken.ledger.reading_seconds, 4),
    }


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for cell in dict.fromkeys(r["cell"] for r in lines):
        mine = [r for r in lines if r["cell"] == cell]
        names = dict.fromkeys(arm for r in mine for arm in r["arms"])
        cells[cell] = {
            "n": len(mine),
            "prompt_tokens": round(statistics.median(r["tokens"] for r in mine)),
            "bm25_hit": round(sum(r["bm25_hit"] for r in mine) / len(mine), 4),
            "arms": {arm: _row([r for r in mine if arm in r["arms"]], arm) for arm in names},
        }
    return cells


def _row(mine: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    held = [(r["arms"]["full"], r["arms"][arm]) for r in mine if "refused" not in r["arms"][arm]]
    row: dict[str, Any] = {"n": len(held), "refused": len(mine) - len(held)}
    if not held:
        return row
    tp, fp, fn = (sum(a[k] for _, a in held) for k in ("tp", "fp", "fn"))
    row |= {
        "micro_f1": round(2 * tp / max(1, 2 * tp + fp + fn), 4),
        # against the full prefill of the same run, also where arms were added by a later one
        "first_token_ratio": round(
            statistics.median(a.get("ratio", f["first_token_s"] / a["first_token_s"]) for f, a in held), 2
        ),
    }
    if "kl" in held[0][1]:
        # a mean per prompt first: its spread over prompts is what the standard error is of
        each = torch.tensor([sum(a["kl"]) / len(a["kl"]) for _, a in held])
        kl = torch.tensor([v for _, a in held for v in a["kl"]])
        top1 = [v for _, a in held for v in a["top1"]]
        row |= {
            "mean_kl": round(float(kl.mean()), 4),
            "kl_standard_error": round(float(each.std(unbiased=True) / len(each) ** 0.5), 4) if len(each) > 1 else None,
            "p95_kl": round(float(kl.quantile(0.95)), 4),
            "top1": round(sum(top1) / len(top1), 4),
            "charged_share": round(statistics.mean(a["charged"] for _, a in held), 4),
            "nominal_share": round(statistics.mean(a["nominal"] for _, a in held), 4),
        }
    return row


if __name__ == "__main__":
    main()
