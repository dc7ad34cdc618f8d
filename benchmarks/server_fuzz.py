"""What the server makes of requests that nobody would send in earnest.

    python benchmarks/server_fuzz.py --model PATH --schemathesis st --json OUT.json [--examples 10000]

Generated requests: schemathesis (a program of its own: `pip install schemathesis`) reads ``/openapi.json`` and sends
bodies that keep its rules and bodies that break them. Written ones: 100 MB of body, clients that send a byte now and
then, bytes that are no UTF-8, nesting, ten thousand documents. A status of 500 or above is a failure, but for a full
queue; so is a server that does not answer a plain request meanwhile, or whose memory grows by more than it may hold.
After a failure but of memory, which is left to who reads, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serving import Server, finish, server

from kvquilt.bench import environment, portable

SLOW = 50  # clients at once that never finish what they send


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--schemathesis", default="st", help="its program")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=10_000, help="generated requests at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    given = ["--dtype", "float32", "--threads", "1", "--method", "none", "--log-level", "warning"]
    with tempfile.TemporaryDirectory() as store, server(options.model, Path(store), *given) as served:
        served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})
        memory = [served.rss]
        written = {}
        for name, work in WRITTEN.items():
            written[name] = work(served)
            print(name, written[name], flush=True)
        memory.append(served.rss)
        generated = fuzzed(served, options)
        memory.append(served.rss)
        served.rests()
        plain = served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0]
        failed = [line for line in served.said if '"failure"' in line or "Traceback" in line]
        status = served.stop()
    result = {
        **environment(),
        "threads": 1,
        "model": portable(options.model),
        "dtype": "float32",
        "seed": options.seed,
        "written": written,
        "generated": generated,
        "memory_megabytes": [round(each / 1e6, 1) for each in memory],
        "plain_request_behind": plain,
        "unexpected_in_log": failed[:5],
        "exit_status": status,
    }
    print(json.dumps(result, indent=1))
    finish(result, options.json, bars(result))


def bars(result: dict[str, Any]) -> dict[str, bool]:
    """What must hold of a run, in words, and whether it does."""
    errors, unexpected = result["generated"]["server_errors"], result["unexpected_in_log"]
    behind, status = result["plain_request_behind"], result["exit_status"]
    written = {
        f"{name}: {said}": re.search(r"\b5\d\d\b(?! s)", said) is None for name, said in result["written"].items()
    }
    return {
        **written,
        f"beside slow clients: {result['written']['slow']}": result["written"]["slow"].startswith("others 200"),
        f"{len(errors)} server errors in generated requests": not errors,
        f"{len(unexpected)} unexpected lines in the log": not unexpected,
        f"a plain request behind all is answered {behind}": behind == 200,
        f"the server ended with {status}": status == 0,
    }


def fuzzed(served: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Runs of schemathesis, each with another seed, until so many requests are sent; statuses by number."""
    statuses: dict[str, int] = {}
    runs, failures = 0, []
    while sum(statuses.values()) < options.examples:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.har"
            command = [
                options.schemathesis, "run", f"{served.url}/openapi.json", "--checks", "not_a_server_error",
                "--continue-on-failure", "--seed", str(options.seed + runs), "--max-examples", "400", "--no-shrink",
                "--phases", "coverage,fuzzing", "--report-har-path", str(report), "--request-timeout", "120",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            entries = json.loads(report.read_text(encoding="utf-8"))["log"]["entries"]
        for each in entries:
            name = str(each["response"]["status"])
            statuses[name] = statuses.get(name, 0) + 1
            if name.startswith("5"):
                failures.append(f"{each['request']['method']} {urlsplit(each['request']['url']).path}: {name}")
        runs += 1
        print(done.stdout[-400:], statuses, flush=True)
    return {"requests": sum(statuses.values()), "statuses": statuses, "server_errors": failures[:20], "runs": runs}


def large(served: Server) -> str:
    """100 MB in one body, declared and in chunks."""
    filler = b'{"prompt": "' + b"a" * (100 << 20) + b'"}'
    declared = raw(served, b"content-length: %d\r\n" % len(filler), filler)
    chunks = b"".join(b"%x\r\n" % (1 << 20) + b"a" * (1 << 20) + b"\r\n" for _ in range(100)) + b"0\r\n\r\n"
    return f"{declared}, in chunks {raw(served, b'transfer-encoding: chunked' + CRLF, chunks)}"


def slow(served: Server) -> str:
    """Clients that open a request and never end it, while others are answered."""
    host, port = urlsplit(served.url).netloc.split(":")
    held = []
    for number in range(SLOW):
        made = socket.create_connection((host, int(port)), timeout=90)
        half = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        made.sendall(half if number % 2 else half + b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{")
        held.append(made)
    start = time.monotonic()
    status = served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0]
    waited = time.monotonic() - start
    ended = [what_became_of(each) for each in held[:2]]  # when its patience is over: within headers, within a body
    for each in held:
        each.close()
    return f"others {status} after {waited:.2f} s; they {ended} after {time.monotonic() - start:.0f} s"


def no_text(served: Server) -> str:
    body = b'{"prompt": "\xff\xfe"}'
    return raw(served, b"content-length: %d\r\n" % len(body), body)


def nested(served: Server) -> str:
    body = b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    return raw(served, b"content-length: %d\r\n" % len(body), body)


def many(served: Server) -> str:
    """Ten thousand documents in one prompt, and in one upload that names no text."""
    parts = [{"type": "document", "id": f"n{n}", "text": f"text {n}"} for n in range(10_000)]
    asked = served.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})[0]
    upload = served.ask("/v1/documents", {"documents": [{"id": f"n{n}"} for n in range(10_000)]})[0]
    return f"{asked}, {upload}"


CRLF = b"\r\n"
WRITTEN = {"large": large, "slow": slow, "no UTF-8": no_text, "nested": nested, "many documents": many}


def raw(served: Server, header: bytes, body: bytes) -> str:
    """Send bytes as they are; the status, or what became of the connection."""
    host, port = urlsplit(served.url).netloc.split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + header + CRLF
    with socket.create_connection((host, int(port)), timeout=90) as made:
        made.sendall(head)
        with suppress(OSError):  # it said no before it had read all; its answer stands in the socket
            made.sendall(body)
        return what_became_of(made)


def what_became_of(made: socket.socket) -> str:
    """The status that it was answered with, or what happened to the connection."""
    try:
        found = re.match(rb"HTTP/1.1 (\d+)", made.recv(1000))
    except OSError as error:
        return type(error).__name__
    return found[1].decode() if found else "hung up"


if __name__ == "__main__":
    main()
