"""What the server adds to the time to the first token, at one client: its stream against the library's, in turns.

    python benchmarks/server_overhead.py --model PATH --json OUT.json [--pairs 100]

The server runs in a process of its own, the library in this one; only one of them works at a time. Each round asks one
prompt over documents that both have compiled, once the server and twice the library, in an order drawn anew;
differences are taken within rounds. Those of the library to itself are the noise that stands in the server's, too. The
client opens a connection for every request.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from serving import chat, server, texts
from store import percentiles

from kvquilt.bench import environment, portable
from kvquilt.engine import Engine
from kvquilt.prompt import Document, Prompt

_WARM = 5
PER_PROMPT = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--characters", type=int, default=600)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    uploads, rng = texts(options.documents, options.characters), random.Random(options.seed)
    kept = {each["id"]: Document(each["text"], id=each["id"]) for each in uploads}
    given = ["--dtype", options.dtype, "--threads", str(options.threads), "--method", "none", "--log-level", "error"]
    library, again, served_seconds = [], [], []
    with (
        tempfile.TemporaryDirectory() as store,
        tempfile.TemporaryDirectory() as own,
        server(options.model, Path(store), *given) as served,
        Engine.load(
            options.model, dtype=options.dtype, threads=options.threads, store_dir=own, conversations=0
        ) as engine,
    ):
        served.upload(uploads)
        engine.compile(list(kept.values()), gate=False)
        for number in range(_WARM + options.pairs):
            chosen = rng.sample(uploads, PER_PROMPT)
            question = f"Question {number}: what does it return?"
            body = chat(chosen, question, 2, stream=True)

            def over_http(body: dict[str, object] = body) -> None:
                with closing(served.events("/v1/chat/completions", body)) as events:
                    next(events)

            def within(chosen: list[dict[str, str]] = chosen, question: str = question) -> None:
                content = [*(kept[each["id"]] for each in chosen), question]
                prompt = Prompt.chat([{"role": "user", "content": content}], engine.model.tokenizer)
                with engine.stream(prompt, method="none", max_new_tokens=2) as pieces:
                    next(iter(pieces), None)

            ways: list[tuple[list[float], Callable[[], None]]] = [
                (served_seconds, over_http), (library, within), (again, within),
            ]  # fmt: skip
            rng.shuffle(ways)
            for found, work in ways:
                start = time.perf_counter()
                work()
                found.append(time.perf_counter() - start)
                served.rests()
        status = served.stop()
    library, again, served_seconds = library[_WARM:], again[_WARM:], served_seconds[_WARM:]
    result = {
        **environment(),
        "threads": options.threads,
        "model": portable(options.model),
        "dtype": options.dtype,
        "seed": options.seed,
        "pairs": options.pairs,
        "library": percentiles(library),
        "server": percentiles(served_seconds),
        "difference": percentiles([a - b for a, b in zip(served_seconds, library, strict=True)]),
        "library_to_itself": percentiles([a - b for a, b in zip(again, library, strict=True)]),
        "ratio_of_medians": round(statistics.median(served_seconds) / statistics.median(library), 4),
        "exit_status": status,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
