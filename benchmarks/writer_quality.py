"""What trained writers keep of full prefill's answers on a real model: held-out Biography, through the product itself.

Per arm (a method as the command line writes it): corpus micro-F1, KL per answer token to full prefill along its own
answer, top-1 agreement, recovery = (F1 - none) / (full - none), and the ratio of times to the first token. Beside them
full prefill over only the documents that BM25 ranks best. Documents are compiled before anything is timed. One JSON
line per item; a run that was stopped continues where it stopped, and arms can be added later.

    python benchmarks/writer_quality.py --model DIR --writer PATH ... --lines LINES.jsonl --json OUT.json \
        --arms none retrieved-document sempic retrieved-document:5%,writer=sempic
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvquilt.bench import environment
from kvquilt.config import Settings
from kvquilt.engine import Engine
from kvquilt.evaluation.tasks.biography import SYSTEM, BiographyTask
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.metrics import Counts, bag_counts, bare_value, f1_recovery, micro_f1_bag
from kvquilt.fidelity import Spoken, compare, truth
from kvquilt.model.load import load_model
from kvquilt.placement import place_runs
from kvquilt.repair.presets import find_method
from kvquilt.retrieval import ranked_documents
from kvquilt.store import Store
from kvquilt.writers.artefact import load_writer

_NEW = 32
_FEWER = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", help="how the model is called in the result")
    parser.add_argument("--writer", type=Path, nargs="*", default=[])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", required=True, metavar="METHOD")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--among", type=int, default=100, help="people whom the items are about")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = Settings.resolve()[0]
    model = load_model(options.model, options.dtype, "cpu", options.threads, settings)
    writers = {each.kind: each for each in (load_writer(path, model) for path in options.writer)}
    items = BiographyTask().items("test", options.items, options.documents, options.seed, options.among)
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(model, Store.open(folder, 8 << 30, 20 << 30), settings, system=SYSTEM) as engine,
    ):
        engine.reader = replace(engine.reader, trained=writers)
        for n, item in enumerate(items):
            known = next((r["arms"] for r in _lines(options.lines) if r["item"] == n), {})
            arms = [arm for arm in options.arms if arm not in known]
            if not arms:
                continue
            record = {"item": n, "group": item.group, **_measure(engine, item, arms, bool(known))}
            with options.lines.open("a") as out:
                out.write(json.dumps(record) + "\n")
            print(f"item {n + 1} of {len(items)}", flush=True)
    lines = _lines(options.lines)
    result = {
        **environment(),
        "model": options.model_name or Path(options.model).name,
        "dtype": options.dtype,
        "seed": options.seed,
        "documents": options.documents,
        "writers": {kind: each.digest for kind, each in writers.items()},
        "n": len(lines),
        "bm25_hit": sum(r["bm25_hit"] for r in lines) / len(lines),
        "prompt_tokens": statistics.median(r["tokens"] for r in lines),
        "arms": _summary(lines),
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """One record per item: a later line adds the arms that an earlier one lacks."""
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        first = found.setdefault(record["item"], record)
        first["arms"] = record["arms"] | first["arms"]
    return [found[n] for n in sorted(found)]


def _measure(engine: Engine, item: Item, arms: list[str], again: bool) -> dict[str, Any]:
    """Every arm on one item. `again`: the arms join others of an earlier run, which has the controls."""
    runs = engine.prompt(item.question, item.documents).runs(engine.model.tokenizer)
    ranking = ranked_documents(item.question, item.documents)
    true = truth(engine, place_runs(runs), None, _NEW)
    out: dict[str, Any] = {"full": _score(engine, true, item)}
    for top in () if again else _FEWER:
        few = [d for n, d in enumerate(item.documents) if n in ranking[:top]]
        placement = place_runs(engine.prompt(item.question, few).runs(engine.model.tokenizer))
        out[f"full prefill of the best {top}"] = _score(engine, truth(engine, placement, None, _NEW), item)
    for arm in arms:
        method = find_method(arm)
        engine.compile(item.documents, gate=False, method=arm)
        placement = place_runs(runs, method.order, ranking if method.needs_ranking else (), method.moved)
        close = compare(engine, placement, method, None, true, own=_NEW)
        spent = close.spoken.ledger.spending
        out[arm] = {
            **_score(engine, close.spoken, item),
            "kl": [round(float(v), 6) for v in close.kl],
            "top1": [int(v) for v in close.agree],
            "charged": round(spent.charged_share, 5) if spent else 0.0,
            "ratio": round(true.ledger.reading_seconds / close.spoken.ledger.reading_seconds, 3),
        }
    tokens = place_runs(runs).tokens
    return {"answer": item.answers[0], "tokens": tokens, "bm25_hit": ranking[0] in item.gold, "arms": out}


def _score(engine: Engine, spoken: Spoken, item: Item) -> dict[str, Any]:
    stop = engine.model.stop_ids
    text = engine.model.tokenizer.decode([i for i in spoken.ids if i not in stop], skip_special_tokens=True)
    counts = bag_counts(text, item.answers, bare_value)
    return {"text": text, "counts": [counts.tp, counts.fp, counts.fn]}


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(arm for r in lines for arm in r["arms"]))
    scores = {arm: micro_f1_bag(Counts(*r["arms"][arm]["counts"]) for r in lines if arm in r["arms"]) for arm in names}
    out: dict[str, Any] = {}
    for arm in names:
        mine = [r["arms"][arm] for r in lines if arm in r["arms"]]
        row: dict[str, Any] = {"n": len(mine), "micro_f1": round(scores[arm], 4)}
        if "none" in scores:
            recovery = f1_recovery(scores[arm], scores["none"], scores["full"])
            row["recovery"] = None if recovery is None else round(recovery, 4)
        if "kl" in mine[0]:
            each = torch.tensor([statistics.mean(r["kl"]) for r in mine])
            kl = torch.tensor([v for r in mine for v in r["kl"]])
            row |= {
                "mean_kl": round(float(kl.mean()), 4),
                "kl_standard_error": round(float(each.std() / len(each) ** 0.5), 4) if len(each) > 1 else None,
                "p95_kl": round(float(kl.quantile(0.95)), 4),
                "top1": round(statistics.mean(v for r in mine for v in r["top1"]), 4),
                "charged_share": round(statistics.mean(r["charged"] for r in mine), 4),
                "first_token_ratio": round(statistics.median(r["ratio"] for r in mine), 2),
            }
        out[arm] = row
    return out


if __name__ == "__main__":
    main()
