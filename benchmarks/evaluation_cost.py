"""What the evaluation harness costs beside the model: processor seconds of a run over those inside its forwards.

Biography under `none`, with what every run has beside it (full prefill, no context, the noise floor). The first item is
left out: the controls and the model's first forwards are in it. Beside the ratio, what the time outside forwards goes
to, from a second run under the profiler; and how much the process's peak memory grows from the first fifth of the items
to the last, with a memory tier too small to hold them.

    python benchmarks/evaluation_cost.py --model PATH --json OUT.json [--items 40]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvquilt.bench import environment, portable
from kvquilt.config import Settings
from kvquilt.engine import Engine
from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.run.config import RunConfig
from kvquilt.evaluation.run.run import Run, RunProgress
from kvquilt.evaluation.tasks.biography import BiographyTask
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import load_model
from kvquilt.store import Store

_TOP = 8
_MEMORY = 64 << 20  # bytes of the memory tier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = Settings.resolve()[0]
    model = load_model(options.model, options.dtype, "cpu", options.threads, settings)
    with Engine(model, Store.open(None, _MEMORY, None), settings, system=BiographyTask.system) as engine:
        whole, inside, peaks = _timed(engine, options.items)
        again = _timed(engine, options.items)[2]
        profiler = cProfile.Profile()
        profiler.enable()
        _timed(engine, max(2, options.items // 4), seed=1)
        profiler.disable()
    fifths = [peaks[(n + 1) * (len(peaks) - 1) // 5] for n in range(5)]
    result = {
        **environment(),
        "model": portable(options.model),
        "dtype": options.dtype,
        "items": options.items,
        "seed": 0,
        "processor_seconds": round(whole, 2),
        "in_forwards": round(inside, 2),
        "ratio": round(whole / inside, 4),
        "outside": _outside(profiler),
        "peak_megabytes": {"after_each_fifth": fifths, "the_same_items_again": again[-1]},
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def _timed(engine: Engine, count: int, seed: int = 0) -> tuple[float, float, list[float]]:
    """Processor seconds of all items but the first, those inside forwards, and the peak in MB after every item."""
    task, marks, peaks = BiographyTask(), [], []

    def each(progress: RunProgress) -> None:
        if progress.method == "full":  # an item begins; what ends one is written before
            marks.append((time.process_time(), spent[0]))
            peaks.append(round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1))

    with tempfile.TemporaryDirectory() as folder, _counted() as spent:
        config = RunConfig(("none", "full-again"), task.metric, task.answer_limit)
        finished = Run(engine, task.items("evaluation", count + 1, seed=seed), config, Path(folder) / "run").go(each)
        end = time.process_time(), spent[0]
    summarise(finished)
    return end[0] - marks[1][0], end[1] - marks[1][1], peaks


@contextmanager
def _counted() -> Iterator[list[float]]:
    """Processor seconds inside forwards so far."""
    forward, spent = LanguageModel.forward, [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return forward(*args, **kwargs)
        finally:
            spent[0] += time.process_time() - began

    LanguageModel.forward = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        LanguageModel.forward = forward  # type: ignore[method-assign]


def _outside(profiler: cProfile.Profile) -> list[dict[str, Any]]:
    """Functions of this project by their whole share of the profiled time, forwards and what holds them left out."""
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    total = max(each[3] for each in stats.values())
    inner = [
        (cumulative / total, Path(where[0]).stem, where[2])
        for where, (_, _, _, cumulative, _) in stats.items()
        if "kvquilt" in where[0] and "model" not in Path(where[0]).parts[-2] and cumulative / total < 0.1
    ]
    return [
        {"function": f"{stem}.{name}", "share": round(share, 4)}
        for share, stem, name in sorted(inner, reverse=True)[:_TOP]
    ]


if __name__ == "__main__":
    main()
