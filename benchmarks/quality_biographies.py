"""What reuse costs in answers: full prefill, pure reuse and one recomputed document, on invented biographies.

Per cell (documents x length x encoding x ranking): corpus micro-F1 of short answers, KL per token to full prefill over
full prefill's own answer, top-1 agreement, and the ratio of times to the first token. One JSON line per item and cell;
a run that was stopped continues where it stopped.

    python benchmarks/quality_biographies.py --model PATH --lines LINES.jsonl --json OUT.json
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
from kvquilt.ledger import Ledger
from kvquilt.model.load import load_model
from kvquilt.model.rows import RowPlan
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Document
from kvquilt.repair.presets import METHODS
from kvquilt.retrieval import rank
from kvquilt.store import Store

_CELLS = ("5-short:100", "10-short:100", "5-long:100", "10-long:100")
_NEW = 16
_SYSTEM = "Answer the question from the documents with the bare value only: no sentence, no other word."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", help="how the model is called in the result")
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", default=_CELLS, metavar="DOCUMENTS-LENGTH:QUESTIONS")
    parser.add_argument("--split", default="test", choices=("train", "test"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = Settings.resolve()[0]
    model = load_model(options.model, threads=options.threads, settings=settings)
    done = {(r["cell"], r["item"]) for r in _lines(options.lines)}
    with tempfile.TemporaryDirectory() as folder:
        stores = {e: Store.open(Path(folder) / e, 4 << 30, 20 << 30) for e in ("isolated", "shared-prefix")}
        engines = {
            e: Engine(model, store, settings, shared_prefix=e == "shared-prefix", system=_SYSTEM)
            for e, store in stores.items()
        }
        for entry in options.cells:
            cell, count = entry.split(":")
            documents, length = cell.split("-")
            for n, item in enumerate(items(options.split, int(count), int(documents), options.seed)):
                if (cell, n) in done:
                    continue
                record = {"cell": cell, "item": n, **_measure(engines, item, length)}
                with options.lines.open("a") as out:
                    out.write(json.dumps(record) + "\n")
                print(f"{cell}: item {n + 1} of {count}", flush=True)
    result = {
        **environment(),
        "model": options.model_name or Path(options.model).name,
        "seed": options.seed,
        "split": options.split,
        "cells": _summary(_lines(options.lines)),
    }
    result["command"] = re.sub(r"\S*/(?=\S)", "", result["command"])
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _measure(engines: dict[str, Engine], item: Any, length: str) -> dict[str, Any]:
    """Every arm on one item. Encodings share the prompt, so full prefill runs once."""
    documents = [Document(getattr(p, length), id=p.name) for p in item.people]
    any_engine = engines["isolated"]
    runs = any_engine.prompt(item.question, documents).runs(any_engine.model.tokenizer)
    scores = rank(item.question, documents)
    targets = {"known": item.gold, "bm25": max(range(len(scores)), key=scores.__getitem__)}
    truth = _answer(any_engine, place_runs(runs), "full")
    arms = {"full": _score(truth, item.answer)}
    for encoding, engine in engines.items():
        engine.compile(documents, gate=False)
        arms[f"none, {encoding}"] = _compare(engine, place_runs(runs), "none", truth, item.answer)
        seen: dict[int, dict[str, Any]] = {}
        for ranking, target in targets.items():
            if target not in seen:
                placement = place_runs(runs, METHODS["retrieved-document"].order, target)
                seen[target] = _compare(engine, placement, "retrieved-document", truth, item.answer)
            arms[f"retrieved-document, {encoding}, {ranking}"] = seen[target]
    last = place_runs(runs, METHODS["retrieved-document"].order, item.gold)
    if len(documents) == 5:
        arms["full, asked document last"] = _score(_answer(any_engine, last, "full"), item.answer)
    return {
        "answer": item.answer,
        "tokens": place_runs(runs).tokens,
        "bm25_hit": targets["bm25"] == item.gold,
        "arms": arms,
    }


def _answer(engine: Engine, placement: Placement, method: str) -> dict[str, Any]:
    """Greedy answer with the logits of every step."""
    model, ledger = engine.model, Ledger()
    logits, cache = engine.reader.read(placement, METHODS[method], None, ledger, _NEW)
    steps, ids = [logits[-1]], []
    while len(ids) < _NEW:
        token = int(steps[-1].argmax())
        ids.append(token)
        if token in model.stop_ids or len(ids) == _NEW:
            break
        slot = cache.filled
        plan = RowPlan(torch.tensor([slot]), slot + 1)
        steps.append(model.forward(torch.tensor([[token]]), plan, cache)[0, -1])
    model.pool.release(cache)
    text = model.tokenizer.decode([i for i in ids if i not in model.stop_ids], skip_special_tokens=True)
    first = sum(ledger.seconds.get(stage, 0.0) for stage in ("lookup", "place", "read"))
    return {"ids": ids, "logits": torch.stack(steps), "text": text, "first_token_s": first, "ledger": ledger}


def _compare(engine: Engine, placement: Placement, method: str, truth: dict[str, Any], gold: str) -> dict[str, Any]:
    """The arm's own answer, and its distributions along full prefill's answer."""
    own = _answer(engine, placement, method)
    forced = placement.followed_by(tuple(truth["ids"][:-1]))
    rows = len(truth["ids"])
    logits, cache = engine.reader.read(forced, METHODS[method], None, Ledger(), 0, rows)
    engine.model.pool.release(cache)
    p, q = truth["logits"].log_softmax(-1), logits.log_softmax(-1)
    return {
        **_score(own, gold),
        "kl": [round(float(v), 6) for v in (p.exp() * (p - q)).sum(-1)],
        "top1": [int(v) for v in p.argmax(-1) == q.argmax(-1)],
        "computed": own["ledger"].forward_tokens["read"],
    }


def _score(answer: dict[str, Any], gold: str) -> dict[str, Any]:
    return {
        "text": answer["text"],
        **shared_words(answer["text"], gold),
        "first_token_s": round(answer["first_token_s"], 4),
    }


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for cell in dict.fromkeys(r["cell"] for r in lines):
        mine = [r for r in lines if r["cell"] == cell]
        arms = {}
        for arm in mine[0]["arms"]:
            rows = [r["arms"][arm] for r in mine]
            tp, fp, fn = (sum(r[k] for r in rows) for k in ("tp", "fp", "fn"))
            kl = torch.tensor([v for r in rows for v in r.get("kl", ())])
            ratios = [r["arms"]["full"]["first_token_s"] / r["arms"][arm]["first_token_s"] for r in mine]
            arms[arm] = {
                "micro_f1": round(2 * tp / max(1, 2 * tp + fp + fn), 4),
                "first_token_ratio": round(statistics.median(ratios), 2),
            }
            if len(kl):
                top1 = [v for r in rows for v in r["top1"]]
                arms[arm] |= {
                    "mean_kl": round(float(kl.mean()), 4),
                    "p95_kl": round(float(kl.quantile(0.95)), 4),
                    "top1": round(sum(top1) / len(top1), 4),
                }
        cells[cell] = {
            "n": len(mine),
            "prompt_tokens": round(statistics.median(r["tokens"] for r in mine)),
            "bm25_hit": round(sum(r["bm25_hit"] for r in mine) / len(mine), 4),
            "arms": arms,
        }
    return cells


if __name__ == "__main__":
    main()
