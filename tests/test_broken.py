"""Faults that were found by trying to break things, each held by a test."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvquilt import answer as answers
from kvquilt.decode import Sampling
from kvquilt.errors import InputError
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


@pytest.mark.parametrize(
    ("option", "value"),
    [("seed", 1 << 64), ("seed", -(1 << 63) - 1), ("temperature", 10**400)],
)
def test_numbers_that_torch_cannot_hold_are_input_errors(option: str, value: int) -> None:
    with make_engine() as engine:
        before = engine.model.pool.lent
        with pytest.raises(InputError) as caught:
            engine.ask(QUESTION, documents(), **{"temperature": 1.0, option: value})
        assert caught.value.field == option
        at_rest(engine, lent=before)


@pytest.mark.parametrize("options", [{"temperature": 5e-324}, {"temperature": 1e-38}, {"top_p": 5e-324}])
def test_sampling_at_the_end_of_its_range_takes_the_likeliest_token(options: dict[str, float]) -> None:
    sampling = Sampling(**{"temperature": 1.0, "seed": 0, **options})
    assert sampling.pick(torch.tensor([-40.0, 20.0, 19.5, 3.0]), sampling.generator()) == 1
