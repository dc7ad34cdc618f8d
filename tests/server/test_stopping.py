"""What clients are told whose requests the end of the server meets."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvquilt.engine import Engine
from kvquilt.model.steps import Steps
from kvquilt.server.limits import Limits
from tests.engines import at_rest
from tests.server.running import Served, serving
from tests.waiting import until


def post(served: Served, path: str, sent: dict[str, Any]) -> httpx2.Response:
    with httpx2.Client(base_url=served.url, timeout=60) as client:  # not one that the end of the server closes
        return client.post(path, json=sent)


def told(asked: Future[httpx2.Response]) -> tuple[int, str, str]:
    answer = asked.result(30)
    return answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]


def test_an_answer_that_the_grace_is_too_short_for(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Steps.step

    def slow(self: Steps, *args: Any) -> Any:
        time.sleep(0.1)  # not a wait for anything: the model is this slow
        return step(self, *args)

    monkeypatch.setattr(Steps, "step", slow)
    with ThreadPoolExecutor(1) as pool:
        with serving(Limits(grace=1.0)) as served:
            asked = pool.submit(post, served, "/v1/completions", {"prompt": "a", "max_tokens": 600})
            until(lambda: served.service.scheduler.streams == 1)
        assert told(asked) == (503, "stopping", "5")
    at_rest(served.engine)


def test_one_that_waits_for_a_document_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), Engine.compile

    def compile(self: Engine, *args: Any, **options: Any) -> Any:
        assert go.wait(30)
        return real(self, *args, **options)

    monkeypatch.setattr(Engine, "compile", compile)
    named = {"prompt": "When?", "max_tokens": 2, "kvquilt": {"documents": [{"id": "a"}], "method": "none"}}
    with ThreadPoolExecutor(1) as pool, serving(Limits(grace=60.0), tmp_path) as served:
        assert post(served, "/v1/documents", {"id": "a", "text": "Rye needs two days."}).status_code == 202
        asked = pool.submit(post, served, "/v1/completions", named)
        until(lambda: served.service.scheduler.waiting == 1)
        served.service.stopping()
        assert told(asked) == (503, "stopping", "5")
        go.set()
