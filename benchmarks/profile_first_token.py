"""Where the time goes: placing segments, the question on a ready cache, one recomputed document, one decoded token.

    python benchmarks/profile_first_token.py --model smollm2 --json OUT.json

Self CPU time by operator as torch's profiler sees it, in milliseconds, and the whole of each part without the profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from kvquilt.answer import step
from kvquilt.bench import TtftPlan, environment, open_engine, portable, texts
from kvquilt.config import Settings
from kvquilt.ledger import Ledger
from kvquilt.placement import place_runs
from kvquilt.repair.operator import assemble, repair
from kvquilt.repair.presets import METHODS

_TOP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    plan = TtftPlan(options.model, options.context_tokens, options.documents, threads=options.threads)
    settings = Settings.resolve()[0]
    with tempfile.TemporaryDirectory() as folder, open_engine(plan, settings, Path(folder)) as engine:
        parts = _parts(engine, plan)
        result = {
            **environment(),
            "model": portable(plan.model),
            "seed": 0,
            "parts": {k: _measure(f) for k, f in parts.items()},
        }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def _parts(engine: Any, plan: TtftPlan) -> dict[str, Callable[[], Any]]:
    documents, question = texts(engine, plan)
    engine.compile(documents, gate=False)
    placement = place_runs(engine.prompt(question, documents).runs(engine.model.tokenizer))
    keys = [(engine.reader.key(placement.runs[i].ids, None), placement.runs[i].ids) for i in placement.documents()]
    with engine.store.fetch(keys) as held:
        segments = {i: h.segment for i, h in zip(placement.documents(), held, strict=True)}
    cache = engine.ask(question, documents, method="none", max_new_tokens=1).take_cache()
    cache = engine.model.pool.grow(cache, cache.filled + 200)
    tail = placement.span(len(placement.runs) - 1)
    with_target = place_runs(placement.runs, target=len(documents) - 1)

    def place() -> None:
        engine.model.pool.release(assemble(engine.model, placement, segments, placement.tokens))

    def recompute() -> None:
        method = METHODS["retrieved-document"]
        _, used = engine.reader.read(with_target, method, None, Ledger(), 0)
        engine.model.pool.release(used)

    return {
        "placing all documents": place,
        "the question on a ready cache": lambda: repair(engine.model, cache, placement.ids, [tail]),
        "one document recomputed, placing included": recompute,
        "one decoded token": lambda: step(engine.model, cache, placement.ids[-1]),
    }


def _measure(run: Callable[[], Any], rounds: int = 7) -> dict[str, Any]:
    times = []
    for n in range(rounds + 2):
        began = time.perf_counter()
        run()
        if n > 1:
            times.append((time.perf_counter() - began) * 1e3)
    with profile() as seen:
        run()
    rows = sorted(seen.key_averages(), key=lambda r: -r.self_cpu_time_total)[:_TOP]
    total = sum(r.self_cpu_time_total for r in seen.key_averages())
    return {
        "median_ms": round(statistics.median(times), 2),
        "operators": {
            r.key: {"ms": round(r.self_cpu_time_total / 1e3, 2), "share": round(r.self_cpu_time_total / total, 3)}
            for r in rows
        },
        "calls": {r.key: r.count for r in rows},
    }


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
