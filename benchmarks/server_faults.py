"""A server whose process, disk, remote tier or files fail: answers are those of an undisturbed run, or honest errors.

    PYTHONPATH=. python benchmarks/server_faults.py --model PATH --json OUT.json [--kills 10]

Scenarios: kill -9 while documents compile, and while clients stream; a disk that is full (a small tmpfs, where this
user may mount one); Valkey that stops answering and comes back empty, under load; bits flipped in stored files. Each
time the same prompts are asked, greedily; what they answered undisturbed is the measure, over segments compiled in
other company each time: compiled together, documents differ in their last bits from those compiled apart, and in half
precision an answer can turn on these. Segments that lay on disk when a process was killed must be there, whole, for the
next one. A wrong answer, or a segment that is lost or damaged, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.client import HTTPException
from pathlib import Path
from typing import Any

from serving import Server, chat, finish, server, texts, until

from kvquilt.bench import environment, portable
from tests.store.valkey_server import FOUND as VALKEY
from tests.store.valkey_server import WHY_NOT
from tests.store.valkey_server import Server as Valkey

NEW = 16
FULL = 6 << 20  # bytes of a disk that is full soon
Answers = list[str]


class Bench:
    """What every scenario works with."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rng = options, random.Random(options.seed)
        self.documents = texts(options.documents, options.characters)
        self.prompts = [
            chat(self.rng.sample(self.documents, 3), f"Question {n}: what is it for?", NEW)
            for n in range(options.prompts)
        ]
        self.expected: list[set[str]] = [set() for _ in self.prompts]

    def server(self, store: Path, **environment: str) -> Any:
        chosen = self.options
        given = ["--dtype", chosen.dtype, "--threads", str(chosen.threads), "--method", "none", "--log-level", "error"]
        return server(chosen.model, store, *given, environment=environment)

    def answers(self, served: Server) -> Answers:
        return [answer(served, each) for each in self.prompts]

    def undisturbed(self) -> None:
        """Learn what may be answered: documents uploaded all at once, in other orders, one by one; prompts too."""
        mixed = self.rng.sample(self.documents, len(self.documents))
        for uploads in ([self.documents], [self.documents[::-1]], [mixed], [[each] for each in self.documents]):
            with tempfile.TemporaryDirectory() as store, self.server(Path(store)) as served:
                for each in uploads:
                    served.upload(each)
                together = [""] * len(self.prompts)
                for each in asked_at_once(self, served, together):
                    each.join(600)
                for answers in (self.answers(served), together):
                    for kept, found in zip(self.expected, answers, strict=True):
                        kept.add(found)

    def compared(self, found: Answers) -> dict[str, int]:
        """How many are as undisturbed, refused with a reason, and wrong."""
        kinds = Counter(
            "equal" if got in right else "refused" if got.startswith("refused") else "wrong"
            for got, right in zip(found, self.expected, strict=True)
        )
        return {kind: kinds[kind] for kind in ("equal", "refused", "wrong")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--characters", type=int, default=600)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(SCENARIOS))
    options = parser.parse_args()
    bench = Bench(options)
    bench.undisturbed()
    result: dict[str, Any] = {
        **environment(),
        "threads": options.threads,
        "model": portable(options.model),
        "dtype": options.dtype,
        "seed": options.seed,
        "prompts": len(bench.prompts),
        "different_answers": len(set().union(*bench.expected)),
        "prompts_with_several_answers": sum(len(each) > 1 for each in bench.expected),
    }
    for name, scenario in SCENARIOS.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as store:
                result[name] = scenario(bench, Path(store))
            print(name, json.dumps(result[name]), flush=True)
    finish(result, options.json, bars(result))


def bars(result: dict[str, Any]) -> dict[str, bool]:
    """What must hold of a run, in words, and whether it does."""
    counts = ("wrong", "damaged_segments", "lost_segments")
    return {f"{place}: {count}": count == 0 for place, count in numbers(result) if place.endswith(counts)}


def numbers(told: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that is no object, at any depth, by the names on the way to it."""
    if isinstance(told, dict):
        for name, inner in told.items():
            yield from numbers(inner, f"{place} {name}".strip())
    else:
        yield place, told


def killed_in_compile(bench: Bench, store: Path) -> dict[str, Any]:
    """Uploads, and kill -9 at a moment drawn anew, again and again over one store."""
    lost, answered = 0, Counter[str]()
    for _ in range(bench.options.kills):
        with bench.server(store) as served:
            status, told = served.ask("/v1/documents", {"documents": bench.documents})
            if status != 202:
                raise RuntimeError(f"{status}: {told}")
            time.sleep(bench.rng.random() * bench.options.documents * 0.01)
            served.stop(signal.SIGKILL)
        lost += lost_segments(store)
        with bench.server(store) as served:  # the texts are there; what is not compiled is compiled now
            served.rests()
            until(lambda: all(e["state"] == "ready" for e in served.ask("/v1/documents")[1]["data"]), 600)
            answered.update(bench.compared(bench.answers(served)))
        with bench.server(store) as served:
            for each in bench.documents[::2]:  # for the next time there is something to compile
                served.ask(f"/v1/documents/{each['id']}", method="DELETE")
    return {"kills": bench.options.kills, "answers": dict(answered), "damaged_segments": lost}


def killed_in_load(bench: Bench, store: Path) -> dict[str, Any]:
    """Clients stream, and the process is killed."""
    lost, answered, cut = 0, Counter[str](), 0
    for number in range(bench.options.kills):
        with bench.server(store) as served:
            if not number:
                served.upload(bench.documents)
            before = segments(store)
            found: Answers = ["refused: not asked"] * len(bench.prompts)
            start = time.monotonic()
            for each in asked_at_once(bench, served, list(found)):
                each.join(600)
            whole = time.monotonic() - start  # undisturbed: any moment of it may be the last
            clients = asked_at_once(bench, served, found)
            time.sleep(bench.rng.random() * whole)
            served.stop(signal.SIGKILL)
            for each in clients:
                each.join(60)
            cut += sum(each.startswith("refused") for each in found)
        lost += lost_segments(store) + len(before - segments(store))
        answered.update(bench.compared(found))
        with bench.server(store) as served:
            answered.update(bench.compared(bench.answers(served)))
    return {"kills": bench.options.kills, "cut_off": cut, "answers": dict(answered), "lost_segments": lost}


def full_disk(bench: Bench, store: Path) -> dict[str, Any]:
    """A tmpfs that has no room for all segments: what is kept is whole, everything is answered."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL}", "tmpfs", str(store)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        return {"skipped": done.stderr.strip() or "may not mount"}
    try:
        filler = store / "filler"
        with bench.server(store) as served:
            half = len(bench.documents) // 2
            served.upload(bench.documents[:half])
            free = os.statvfs(store)
            filler.write_bytes(b"\0" * max(0, free.f_bavail * free.f_frsize - (64 << 10)))
            status = [served.ask("/v1/documents", each)[0] for each in bench.documents[half:]]
            time.sleep(1)
            full = bench.compared(bench.answers(served))
            told = served.metrics().items()
            errors = sum(n for name, n in told if name.startswith("store_errors") and 'tier="disk"' in name)
            filler.unlink()
            again = [served.ask("/v1/documents", each)[0] for each in bench.documents]
            until(lambda: all(e["state"] == "ready" for e in served.ask("/v1/documents")[1]["data"]), 600)
            freed = bench.compared(bench.answers(served))
        return {
            "answers_while_full": full, "answers_after_room_was_made": freed, "writes_refused": errors,
            "uploads_while_full": dict(Counter(map(str, status))), "uploads_after": dict(Counter(map(str, again))),
            "damaged_segments": lost_segments(store),
        }  # fmt: skip
    finally:
        subprocess.run(["umount", str(store)], check=True)


def valkey_restarts(bench: Bench, store: Path) -> dict[str, Any]:
    """The remote tier hangs, dies, and comes back empty, while clients ask; memory and disk are too small to help."""
    if VALKEY is None:
        return {"skipped": WHY_NOT}
    valkey = Valkey()
    try:
        small = {"KVQUILT_MEMORY_BYTES": str(1 << 20), "KVQUILT_DISK_BYTES": str(1 << 20)}
        with bench.server(store, KVQUILT_REMOTE=f"{valkey.url}?pause=1", **small) as served:
            served.upload(bench.documents)
            steps: dict[str, Callable[[], Any]] = {
                "there": nullcontext, "hanging": valkey.stopped, "dead": lambda: nullcontext(valkey.kill()),
                "back, empty": lambda: nullcontext(valkey.start()),
            }  # fmt: skip
            answers = {}
            for name, step in steps.items():
                with step():
                    found: Answers = ["refused: not asked"] * len(bench.prompts)
                    for each in asked_at_once(bench, served, found):
                        each.join(300)
                    answers[name] = bench.compared(found)
            metrics = served.metrics()
        remote = {name: value for name, value in metrics.items() if 'tier="valkey"' in name}
        return {"answers": answers, "metrics": remote}
    finally:
        valkey.kill()


def corrupted(bench: Bench, store: Path) -> dict[str, Any]:
    """One bit flipped in half of the stored files while the server is away."""
    with bench.server(store) as served:
        served.upload(bench.documents)
    files = sorted(store.rglob("*.safetensors"))
    for path in files[::2]:
        data = bytearray(path.read_bytes())
        data[bench.rng.randrange(len(data))] ^= 1 << bench.rng.randrange(8)
        path.write_bytes(data)
    with bench.server(store) as served:
        compared = bench.compared(bench.answers(served))
        found = served.metrics().get('integrity_failures_total{tier="disk"}', 0.0)
    return {"files": len(files), "damaged": len(files[::2]), "noticed": found, "answers": compared}


SCENARIOS: dict[str, Callable[[Bench, Path], dict[str, Any]]] = {
    "killed_in_compile": killed_in_compile, "killed_in_load": killed_in_load, "full_disk": full_disk,
    "valkey_restarts": valkey_restarts, "corrupted": corrupted,
}  # fmt: skip


def answer(served: Server, prompt: dict[str, Any]) -> str:
    """The text, or what the server or the connection said instead."""
    try:
        status, told = served.ask("/v1/chat/completions", prompt)
    except (OSError, ValueError, HTTPException) as error:  # the last where a connection ends in the middle
        return f"refused: {type(error).__name__}"
    if status != 200:
        return f"refused: {status} {told['error']['code']}" if isinstance(told, dict) else f"wrong: {told!r:.80}"
    return str(told["choices"][0]["message"]["content"])


def asked_at_once(bench: Bench, served: Server, found: Answers) -> list[threading.Thread]:
    """Every prompt by a client of its own; answers appear in `found`."""

    def ask(number: int) -> None:
        found[number] = answer(served, bench.prompts[number])

    clients = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(len(bench.prompts))]
    for each in clients:
        each.start()
    return clients


def segments(store: Path) -> set[str]:
    return {path.name for path in store.rglob("*.safetensors")}


def lost_segments(store: Path) -> int:
    """How many stored segments are not whole, as `kvquilt store verify` tells."""
    command = [str(Path(sys.executable).with_name("kvquilt")), "store", "verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "KVQUILT_STORE_DIR": str(store)})
    return len(json.loads(done.stdout)["damaged"])


if __name__ == "__main__":
    main()
