"""Time to the first token of every method at every budget, beside full prefill, in one run.

Arms take turns within every round, so a machine that slows down slows them all; medians are reported. Per arm: charged
share, the ratio to full prefill, what choosing rows took, and the peak memory of one request over its slot cache.
Beside them full prefill over fewer documents: what a user could do in the same time without reuse.

    python benchmarks/repair_speed.py --model PATH --json OUT.json [--helper PATH] [--arms none epic:k=16 ...]
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

from kvquilt.bench import environment
from kvquilt.config import Settings
from kvquilt.engine import Engine
from kvquilt.errors import InputError
from kvquilt.ledger import Ledger
from kvquilt.model.load import load_model
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Document, Run
from kvquilt.repair.presets import METHODS, Method, find_method
from kvquilt.store import Store

_BUDGETS = ("2%", "5%", "10%", "15%", "30%")
_FEWER = (1, 2, 4, 8)
_ARMS = (
    "none",
    "retrieved-document",
    *(f"retrieved-document:{b}" for b in _BUDGETS),
    *(f"{m}:{b}" for m in ("spread", "random", "epic:k=4096", "prophetkv", "infoflow", "cacheblend") for b in _BUDGETS),
    *(f"{m}:15%" for m in ("a3", "fusionrag", "infoflow-reorder", "cacheblend-gradual", "samkv", "agentkvshift")),
    *("epic:k=16", "cache-craft", "qcfuse", "ape", "droidspeak", "cacheclip:40%"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", help="how the model is called in the result")
    parser.add_argument("--helper", help="a second, small model for cacheclip")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=_ARMS, metavar="METHOD")
    options = parser.parse_args()
    if options.documents <= max(_FEWER):
        parser.error(f"--documents must be more than {max(_FEWER)}")
    settings = Settings.resolve()[0]
    model = load_model(options.model, threads=options.threads, settings=settings)
    helper = load_model(options.helper, threads=options.threads, settings=settings) if options.helper else None
    with Engine(model, Store.open(None, 4 << 30), settings, helper=helper) as engine:
        runs, documents = _prompt(engine, options.tokens, options.documents, options.question_tokens)
        arms, refused = _arms(
            engine, runs, documents, [a.replace("epic:k=4096:", "epic:k=4096,") for a in options.arms]
        )
        seen: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        for round_number in range(-1, options.rounds):  # the first is not counted: it finds everything cold
            for name, (placement, method) in arms.items():
                if round_number < 0 and name.startswith("full"):
                    continue
                measured = _once(engine, placement, method)
                if round_number >= 0:
                    seen[name].append(measured)
            print(f"round {round_number + 1} of {options.rounds}", flush=True)
    full = statistics.median(m["seconds"] for m in seen["full"])
    fewer = {n: statistics.median(m["seconds"] for m in seen[f"full prefill of {n} documents"]) for n in _FEWER}
    fewer[options.documents] = full
    result = {
        **environment(),
        "model": options.model_name or Path(options.model).name,
        "helper": Path(options.helper).name if options.helper else None,
        "tokens": options.tokens,
        "documents": options.documents,
        "question_tokens": options.question_tokens,
        "rounds": options.rounds,
        "threads": options.threads,
        "dtype": str(model.dtype),
        "refused": refused,
        "arms": {name: _row(measured, full, fewer, arms[name][0].tokens) for name, measured in seen.items()},
    }
    result["command"] = re.sub(r"\S*/(?=\S)", "", result["command"])
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def _prompt(engine: Engine, tokens: int, count: int, question_tokens: int) -> tuple[list[Run], list[Document]]:
    """Documents of about equal length out of the standard library's help texts, and a question of the length asked."""
    from pydoc_data.topics import topics

    tokenizer = engine.model.tokenizer
    text = "\n".join(topics[name] for name in sorted(topics))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    each = tokens // count
    cuts = [encoded[n * each][0] for n in range(count + 1)]
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    # the middle one is the retriever's best
    documents = [Document(p, id=f"help-{n}", end="", score=float(n == count // 2)) for n, p in enumerate(pieces)]
    around = len(engine.prompt("?", documents[:1]).runs(tokenizer)[-1].ids)
    last = encoded[count * each + max(1, question_tokens - around)][0]
    return list(engine.prompt(text[cuts[-1] : last], documents).runs(tokenizer)), documents


def _arms(
    engine: Engine, runs: list[Run], documents: list[Document], names: list[str]
) -> tuple[dict[str, tuple[Placement, Method]], dict[str, str]]:
    """Every arm's placement, its segments stored; and why some cannot run.

    Documents are compiled in the reverse order, so that those encoded where they stood stand elsewhere now.
    """
    full = METHODS["full"]
    arms = {"full": (place_runs(runs), full)}
    for few in _FEWER:
        arms[f"full prefill of {few} documents"] = place_runs([runs[0], *runs[1 : 1 + few], runs[-1]]), full
    refused: dict[str, str] = {}
    ranking = sorted(range(len(documents)), key=lambda n: -(documents[n].score or 0.0))
    for name in names:
        method = find_method(name)
        engine.compile(documents[::-1], gate=False, method=name)
        placement = place_runs(runs, method.order, ranking if method.needs_ranking else (), method.moved)
        try:
            _once(engine, placement, method)
            arms[name] = placement, method
        except InputError as error:
            refused[name] = error.rule
    return arms, refused


def _once(engine: Engine, placement: Placement, method: Method) -> dict[str, Any]:
    """One reading, to the first token's logits."""
    ledger, before = Ledger(), _memory("VmRSS")
    spare = engine.model.pool.stats().spare_bytes
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    began = time.perf_counter()
    _, cache = engine.reader.read(placement, method, None, ledger, 0)
    seconds = time.perf_counter() - began
    # a buffer that the pool had kept and gave to this request is part of it, though it was there before
    given = spare - engine.model.pool.stats().spare_bytes
    peak, slots = _memory("VmHWM") - before + given, placement.tokens * engine.model.bytes_per_token
    engine.model.pool.release(cache)
    spent = ledger.spending
    return {
        "seconds": seconds,
        "choose": ledger.seconds.get("choose", 0.0),
        "probe": ledger.seconds.get("probe", 0.0),
        "place": ledger.seconds.get("place", 0.0),
        "charged": spent.charged_share if spent else 1.0,
        "nominal": spent.nominal_share if spent else 1.0,
        "work": ledger.flops / ledger.flops_full,
        "memory": peak / slots,
    }


def _memory(field: str) -> int:
    """Bytes of a field of the kernel's account of this process."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def _row(measured: list[dict[str, Any]], full: float, fewer: dict[int, float], tokens: int) -> dict[str, Any]:
    def median(field: str) -> float:
        return statistics.median(m[field] for m in measured)

    seconds = [m["seconds"] for m in measured]
    return {
        "prompt_tokens": tokens,
        "ms": round(1000 * median("seconds"), 1),
        "ms_spread": [round(1000 * min(seconds), 1), round(1000 * max(seconds), 1)],
        "documents_fully_prefilled_in_that_time": _documents(median("seconds"), fewer),
        "full_over_method": round(full / median("seconds"), 3),
        "method_over_full": round(median("seconds") / full, 4),
        "charged_share": round(measured[0]["charged"], 4),
        "nominal_share": round(measured[0]["nominal"], 4),
        "estimated_work": round(measured[0]["work"], 4),
        "choosing_over_full": round(median("choose") / full, 5),
        "probe_over_full": round(median("probe") / full, 5),
        "peak_memory_over_slots": round(max(m["memory"] for m in measured), 3),
    }


def _documents(seconds: float, fewer: dict[int, float]) -> float:
    """How many documents a full prefill could take in so many seconds, between the measured numbers; at most all."""
    before, spent = 0, 0.0
    for count, taken in fewer.items():
        if seconds < taken:
            return round(before + (count - before) * max(0.0, seconds - spent) / (taken - spent), 2)
        before, spent = count, taken
    return float(before)


if __name__ == "__main__":
    main()
