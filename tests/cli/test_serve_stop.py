"""SIGTERM to `kvquilt serve` as a process: streams in work end, and no compiled segment is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx2
import openai

LENGTH = 900
TEXTS = [{"id": name, "text": text[:600]} for name, text in sorted(topics.items()) if len(text) > 600][:24]


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    asked = ["serve", str(folder), "--port", "0", "--method", "none", "--threads", "1"]
    command = [sys.executable, "-c", "from kvquilt.cli import main; main()", *asked]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        at = re.search(r"http://[\d.:]+", process.stderr.readline())
        assert at is not None
        yield process, at.group()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def states(http: httpx2.Client) -> dict[str, str]:
    return {each["id"]: each["state"] for each in http.get("/v1/documents?limit=1000").json()["data"]}


def test_a_stream_ends_and_what_is_compiled_stays_when_told_to_stop_in_the_middle(run: Any, model_folder: Path) -> None:
    with (
        served(model_folder) as (process, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
        httpx2.Client(base_url=url, timeout=60) as http,
    ):
        name = client.models.list().data[0].id
        content = [
            {"type": "document", "text": "Rye needs two days."},
            {"type": "text", "text": "How long does it take?"},
        ]
        message: Any = {"role": "user", "content": content}
        stream = client.chat.completions.create(
            model=name, messages=[message], max_tokens=LENGTH, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = iter(stream)
        next(chunks)
        http.post("/v1/documents", json={"documents": TEXTS}).raise_for_status()
        while "ready" not in (found := states(http)).values():
            time.sleep(0.01)
        assert {"queued", "compiling"} & set(found.values()), "all was compiled before it could be stopped"
        process.send_signal(signal.SIGTERM)
        rest = list(chunks)
        assert process.wait(60) == 0
        assert [each.choices[0].finish_reason for each in rest if each.choices][-1] == "length"
        assert rest[-1].usage is not None
        assert rest[-1].usage.completion_tokens == LENGTH
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr if line.startswith("{")]
        assert [each["path"] for each in lines if each["event"] == "request"][-1] == "/v1/chat/completions"  # it ran on

    assert run("store", "verify").code == 0
    ready = sum(state == "ready" for state in found.values())
    assert len(run("store", "ls", "--json").json) > ready > 0  # the stream's own document, too
    assert len(list((Path(os.environ["KVQUILT_STORE_DIR"]) / "documents").rglob("*.json"))) == len(TEXTS)
