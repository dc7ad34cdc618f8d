"""How many rows of a prompt are read at once while others stream: what the streams wait for, and what the prompt pays.

    python benchmarks/shared_rows.py --model PATH --json OUT.json [--rows measured,8,32,128,512]

One stream decodes; meanwhile a long prompt is read in full by another thread. `measured` is what is shipped: rows ride
along with steps, as many as measuring allows. Numbers are portions of so many rows between two steps. Each time, the
stream's pause between two tokens while the prompt is read, over its pause alone (1 would be no wait at all, 2 a wait
of another step), and the prompt's seconds over those that it takes with nobody else there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

from kvquilt.bench import environment, portable
from kvquilt.config import Settings
from kvquilt.engine import Engine
from kvquilt.model.load import load_model
from kvquilt.model.pace import Pace
from kvquilt.model.rides import Ride, Rides
from kvquilt.prompt import Prompt
from kvquilt.store import Store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rows", default="measured,8,32,128,512")
    parser.add_argument("--tokens", type=int, default=1024, help="of the long prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = Settings.resolve()[0]
    model = load_model(options.model, options.dtype, "cpu", options.threads, settings)
    found: dict[str, list[tuple[float, float, float]]] = {}
    with Engine(model, Store.open(None, 1 << 20, None), settings, conversations=0) as engine:
        text = model.tokenizer.decode(model.tokenizer.encode("\n".join(topics.values()))[: options.tokens])
        alone = [reading(engine, text) for _ in range(options.repeats + 1)][1:]
        for _ in range(options.repeats):  # in turns, so that the machine's moods meet all alike
            for rows in options.rows.split(","):
                measured = rows == "measured"
                model.turns.pace = Pace() if measured else Fixed(int(rows))
                model.rides = Rides() if measured else Between()
                found.setdefault(rows, []).append(shared(engine, text))
    result = {
        **environment(),
        "threads": options.threads,
        "model": portable(options.model),
        "dtype": options.dtype,
        "prompt_tokens": options.tokens,
        "prompt_seconds_alone": round(statistics.median(alone), 3),
        "rows": {rows: figures(runs, statistics.median(alone)) for rows, runs in found.items()},
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


class Fixed(Pace):
    """Portions between two steps, of a number of rows that stays as it is."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._portion = float(rows)

    def portion_took(self, rows: int, seconds: float) -> None: ...


class Between(Rides):
    """Nothing rides along."""

    def along(self, ride: Ride, patience: float) -> None: ...


def figures(runs: list[tuple[float, float, float]], alone: float) -> dict[str, float]:
    pause, longest, seconds = (statistics.median(each) for each in zip(*runs, strict=True))
    return {
        "pause_median_ratio": round(pause, 3),
        "pause_p95_ratio": round(longest, 3),
        "prompt_seconds_ratio": round(seconds / alone, 3),
    }


def reading(engine: Engine, text: str) -> float:
    """Seconds until the first token of the long prompt."""
    start = time.perf_counter()
    engine.ask(Prompt([text]), method="full", max_new_tokens=1)
    return time.perf_counter() - start


def shared(engine: Engine, text: str) -> tuple[float, float, float]:
    """Median and 95th percentile of the stream's pauses beside the prompt, over its median alone; the prompt's time."""
    times: list[float] = []
    enough, over = threading.Event(), threading.Event()

    def stream() -> None:
        while not over.is_set():  # an answer may end; the next one goes on
            with engine.stream(Prompt(["Once upon a time"]), method="full", max_new_tokens=256) as pieces:
                for _ in pieces:
                    times.append(time.perf_counter())
                    if len(times) > 24:
                        enough.set()
                    if over.is_set():
                        return

    thread = threading.Thread(target=stream)
    thread.start()
    enough.wait()
    begin = time.perf_counter()
    seconds = reading(engine, text)
    end = time.perf_counter()
    over.set()
    thread.join()
    gaps = [(at, after - at) for at, after in pairwise(times)]
    alone = statistics.median(gap for at, gap in gaps if at < begin)
    beside = sorted(gap for at, gap in gaps if begin <= at < end)
    return statistics.median(beside) / alone, beside[int(len(beside) * 0.95)] / alone, seconds


if __name__ == "__main__":
    main()
