"""A server under load: many streaming clients at once for minutes, and what streams gain by decoding together.

    python benchmarks/server_load.py --model PATH --json OUT.json [--clients 64] [--minutes 10]

Load: every client asks over documents drawn by Zipf's law in random order, and reads its stream to the end; one request
in twelve hangs up after a few pieces. What must hold: no error, resident memory as large at the end as after the first
fifth, within 5 %, and nothing kept at the end: no caches, no pins, and as many bytes as the stored segments have; else
the exit status is 1. Throughput: tokens per second of 8 streams over one stream's, in turns within this run, decoding
alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from serving import Server, chat, finish, server, stored, texts

from kvquilt.bench import environment, portable

STREAMS = 8
QUESTIONS = ("What does it return?", "When is an exception raised?", "Which statement is meant?", "Give an example.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--characters", type=int, default=600, help="of a document")
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer under load")
    parser.add_argument("--decode", type=int, default=96, help="tokens of an answer whose throughput is measured")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    given = ["--dtype", options.dtype, "--threads", str(options.threads), "--method", "none", "--log-level", "error"]
    given += ["--queue", str(options.clients + 8)]
    documents = texts(options.documents, options.characters)
    with tempfile.TemporaryDirectory() as store, server(options.model, Path(store), *given) as served:
        served.upload(documents)
        throughput = measured_throughput(served, options.decode, options.repeats)
        print(json.dumps(throughput), flush=True)
        load = under_load(served, documents, options)
        left = at_the_end(served)
        status = served.stop()
        listed = sum(row["bytes"] for row in stored(store))
    result = {
        **environment(),
        "threads": options.threads,
        "model": portable(options.model),
        "dtype": options.dtype,
        "seed": options.seed,
        "throughput": throughput,
        "load": load,
        "at_the_end": {**left, "bytes_listed_on_disk": listed, "exit_status": status},
    }
    print(json.dumps(result, indent=1))
    finish(result, options.json, bars(result))


def bars(result: dict[str, Any]) -> dict[str, bool]:
    """What must hold of a run, in words, and whether it does."""
    load, end = result["load"], result["at_the_end"]
    left = sum(value for name, value in end.items() if name.startswith(("cache_bytes", "store_pinned")))
    disk = sum(value for name, value in end.items() if name.startswith("store_bytes") and 'tier="disk"' in name)
    drift, listed, status = load["memory_last_fifth_over_second"], end["bytes_listed_on_disk"], end["exit_status"]
    return {
        f"{load['errors']} errors": load["errors"] == 0,
        f"memory is {drift:.3f} times what it was": abs(drift - 1) <= 0.05,
        f"{left:g} bytes of caches and pins are left": left == 0,
        f"{disk:g} bytes are counted on disk and {listed} listed": disk == listed,
        f"the server ended with {status}": status == 0,
    }


def measured_throughput(served: Server, new: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of one stream and of several at once: each stream's from its first to its last, added up."""
    found: dict[int, list[float]] = {1: [], STREAMS: []}
    body = {"prompt": "Once upon a time", "max_tokens": new, "temperature": 1, "stream": True}
    with ThreadPoolExecutor(STREAMS) as pool:
        for turn in range(repeats + 1):
            for streams in found:
                asked = [{**body, "seed": turn * STREAMS + n} for n in range(streams)]
                rates = list(pool.map(lambda each: rate(served, each), asked))
                if turn:  # the first one warms
                    found[streams].append(sum(rates))
    one, several = (statistics.median(found[n]) for n in found)
    return {"one_stream": round(one, 2), f"{STREAMS}_streams": round(several, 2), "ratio": round(several / one, 3)}


def rate(served: Server, body: dict[str, Any]) -> float:
    """Tokens per second behind the first event; a piece of text may be of several."""
    told = {**body, "stream_options": {"include_usage": True}}
    times, events = [], []
    for each in served.events("/v1/completions", told):
        times.append(time.perf_counter())
        events.append(each)
    return (events[-1]["usage"]["completion_tokens"] - 1) / (times[-1] - times[0])


def under_load(served: Server, documents: list[dict[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    """All clients until the time is over; what they met, and the server's memory meanwhile."""
    end = time.monotonic() + options.minutes * 60
    counts: Counter[str] = Counter()
    errors: list[str] = []
    waits: list[float] = []
    lock = threading.Lock()
    weights = [1 / (rank + 1) for rank in range(len(documents))]

    def client(number: int) -> None:
        rng = random.Random(f"{options.seed}-{number}")
        while time.monotonic() < end:
            drawn = sorted(set(rng.choices(range(len(documents)), weights, k=4)))
            rng.shuffle(drawn)
            body = chat([documents[n] for n in drawn], rng.choice(QUESTIONS), options.new, stream=True)
            leaves = rng.random() < 1 / 12
            start = time.perf_counter()
            try:
                with closing(served.events("/v1/chat/completions", body)) as events:
                    first = next(events)
                    waited = time.perf_counter() - start
                    rest = list(islice(events, 3)) if leaves else list(events)
                    finished = bool(rest) and bool(rest[-1]["choices"][0]["finish_reason"])
                    fault = "" if first and (leaves or finished) else f"no end: {rest[-1:]}"
            except Exception as error:  # noqa: BLE001  every one is a result
                waited, fault = 0.0, f"{type(error).__name__}: {error}"
            with lock:
                counts["hung up" if leaves else "answered"] += not fault
                waits.append(waited)
                if fault:
                    errors.append(fault[:200])

    clients = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(options.clients)]
    for each in clients:
        each.start()
    memory = []
    while time.monotonic() < end:
        memory.append(served.rss)
        time.sleep(1)
    for each in clients:
        each.join(600)
    fifth = max(1, len(memory) // 5)
    warm, last = statistics.median(memory[fifth : 2 * fifth]), statistics.median(memory[-fifth:])
    step = max(1, len(memory) // 60)
    return {
        "clients": options.clients,
        "minutes": options.minutes,
        **counts,
        "errors": len(errors),
        "first_errors": errors[:5],
        "seconds_to_first_event_median": round(statistics.median(waits), 3),
        "memory_last_fifth_over_second": round(last / warm, 4),
        "memory_megabytes": [round(each / 1e6, 1) for each in memory[::step]],
    }


def at_the_end(served: Server) -> dict[str, Any]:
    """What is still held when nobody asks any more."""
    served.rests()
    found = served.metrics()
    kept = {name: value for name, value in found.items() if name.startswith(("store_bytes", "store_pinned"))}
    kept |= {name: found[name] for name in ("cache_bytes", "cache_bytes_admitted")}
    hits = {name: value for name, value in found.items() if name.startswith(("prompt_tokens_total", "fallback_total"))}
    return {**kept, **hits}


if __name__ == "__main__":
    main()
