"""Faults that were found by trying to break things, each held by a test."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvquilt import answer as answers
from tests.engines import QUESTION, at_rest, documents, make_engine


def test_a_stream_can_be_cancelled_from_another_thread_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine() as engine:
        before = engine.model.pool.lent
        stream = engine.stream(QUESTION, documents(), method="none", max_new_tokens=40)
        real, faults = answers.step, []

        def cancel() -> None:
            try:
                stream.cancel()
            except ValueError as error:
                faults.append(error)

        def step(*args: Any) -> torch.Tensor:
            other = threading.Thread(target=cancel)
            other.start()
            other.join()
            return real(*args)

        monkeypatch.setattr(answers, "step", step)
        pieces = list(stream)
        assert not faults
        assert stream.answer.stop_reason == "cancelled"
        assert len(stream.answer.token_ids) == 1
        assert "".join(pieces) == stream.answer.text
        at_rest(engine, lent=before)


def test_a_stream_cancelled_while_it_reads_yields_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine() as engine:
        before = engine.model.pool.lent
        stream = engine.stream(QUESTION, documents(), method="none", max_new_tokens=40)
        real = engine.reader.read

        def read(*args: Any) -> Any:
            stream.cancel()  # as a signal handler would
            return real(*args)

        monkeypatch.setattr(type(engine.reader), "read", lambda _, *args: read(*args))
        assert list(stream) == []
        assert (stream.answer.stop_reason, stream.answer.token_ids) == ("cancelled", ())
        at_rest(engine, lent=before)
