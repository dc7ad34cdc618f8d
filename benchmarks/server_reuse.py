"""What a server reuses of requests whose documents are drawn by Zipf's law and stand in random order.

    python benchmarks/server_reuse.py --model PATH --json OUT.json [--queries 500] [--documents 200]

Documents travel in the requests and are compiled on first use; nothing is uploaded. The hit rate is document tokens
that were reused over document tokens. As documents become known it must not fall: that of the last 100 queries is held
against that of queries 50 to 150. Keys: every distinct segment is stored once, plus the opening of prompts. Where one
of these does not hold, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from serving import finish, server, stored, texts

from kvquilt.bench import environment, portable

PER_QUERY = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--characters", type=int, default=400)
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    documents, rng = texts(options.documents, options.characters), random.Random(options.seed)
    weights = [1 / (rank + 1) ** options.exponent for rank in range(len(documents))]
    given = ["--dtype", options.dtype, "--threads", str(options.threads), "--method", "none", "--log-level", "error"]
    shares: list[tuple[int, int]] = []
    seen: set[int] = set()
    with tempfile.TemporaryDirectory() as store:
        with server(options.model, Path(store), *given) as served:
            for number in range(options.queries):
                drawn: set[int] = set()
                while len(drawn) < PER_QUERY:
                    drawn.update(rng.choices(range(len(documents)), weights))
                order = sorted(drawn)
                rng.shuffle(order)
                seen.update(order)
                parts = [{"type": "document", **documents[n]} for n in order]
                content = [*parts, {"type": "text", "text": f"Question {number}: which of them is meant?"}]
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
                status, told = served.ask("/v1/chat/completions", body)
                if status != 200:
                    raise RuntimeError(f"query {number}: {status} {told}")
                shares.append(found(told["kvquilt"]["documents"]))
            status = served.stop()
        keys = len(stored(store))
    rates = {"50_to_150": mean(shares[50:150]), "last_100": mean(shares[-100:]), "all": mean(shares)}
    result = {
        **environment(),
        "threads": options.threads,
        "model": portable(options.model),
        "dtype": options.dtype,
        "seed": options.seed,
        "queries": options.queries,
        "hit_rate": {name: round(value, 4) for name, value in rates.items()},
        "keys": {"stored": keys, "distinct_documents": len(seen)},
        "exit_status": status,
    }
    print(json.dumps(result, indent=1))
    finish(result, options.json, bars(result))


def bars(result: dict[str, Any]) -> dict[str, bool]:
    """What must hold of a run, in words, and whether it does."""
    rate, keys, status = result["hit_rate"], result["keys"], result["exit_status"]
    stored, distinct = keys["stored"], keys["distinct_documents"]
    return {
        f"the hit rate went from {rate['50_to_150']} to {rate['last_100']}": rate["last_100"] >= rate["50_to_150"],
        f"{stored} segments are stored of {distinct} documents": stored - distinct in (0, 1),
        f"the server ended with {status}": status == 0,
    }


def found(told: list[dict[str, Any]]) -> tuple[int, int]:
    """Document tokens that came from the store, and all of them."""
    stored = sum(each["tokens"] for each in told if each["source"] in ("memory", "disk"))
    return stored, sum(each["tokens"] for each in told)


def mean(shares: list[tuple[int, int]]) -> float:
    return sum(each[0] for each in shares) / max(1, sum(each[1] for each in shares))


if __name__ == "__main__":
    main()
