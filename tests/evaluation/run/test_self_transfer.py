"""The controls hold for every method, and fail where the path to the slots is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvquilt.engine import Engine
from kvquilt.evaluation.run.self_transfer import check_method
from kvquilt.prompt import Run
from kvquilt.repair import operator
from kvquilt.repair.presets import METHODS, find_method
from tests.engines import QUESTION, at_rest, documents, make_engine, stored_bytes

pytestmark = pytest.mark.usefixtures("nan_slots")
NEITHER = {"full", "ape"}


def runs_of(engine: Engine) -> tuple[Run, ...]:
    return engine.prompt(QUESTION, documents(3)).runs(engine.model.tokenizer)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_that_they_apply_to_passes(name: str) -> None:
    with make_engine(trained=True) as engine:
        lent = engine.model.pool.lent
        checks = check_method(engine, METHODS[name], runs_of(engine), [1, 2, 0])
        assert all(check.passed and 0 <= check.value <= check.limit for check in checks)
        found = [check.name for check in checks]
        assert found in ([], ["self-transfer"], ["self-transfer", "all rows"])
        assert (found == []) == (name in NEITHER)
        writer = engine.reader.trained.get(METHODS[name].writer)
        assert len(found) != 2 or writer is None or name == "sempic"
        assert len(found) != 1 or writer is not None
        at_rest(engine, lent=lent)


@pytest.mark.parametrize("family", ["gemma3", "phi3-partial", "llama-yarn"])
def test_other_rotations_and_windows_pass(family: str) -> None:
    with make_engine(family) as engine:
        checks = check_method(engine, find_method("retrieved-document"), runs_of(engine), [0, 2, 1])
        assert len(checks) == 2
        assert all(check.passed for check in checks)


@pytest.mark.parametrize("name", ["none", "cache-craft"])
def test_nothing_of_the_control_stays_in_the_store_or_is_learnt(name: str, tmp_path: Path) -> None:
    with make_engine(directory=tmp_path) as engine:
        engine.ask(QUESTION, documents(3), method="none", max_new_tokens=1)
        before = stored_bytes(engine)
        files = {path for path in tmp_path.rglob("*") if path.is_file()}
        check_method(engine, METHODS[name], runs_of(engine), [0, 1, 2])
        assert stored_bytes(engine) == before
        assert {path for path in tmp_path.rglob("*") if path.is_file()} == files


def test_a_broken_way_to_the_slots_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = operator.place

    def beside(segment: Any, position: int, tables: Any, out: torch.Tensor) -> None:
        placed(segment, position + 3, tables, out)

    monkeypatch.setattr(operator, "place", beside)
    with make_engine() as engine:
        transfer, every = check_method(engine, METHODS["none"], runs_of(engine), [0, 1, 2])
        assert not transfer.passed
        assert transfer.value > 100 * transfer.limit
        # the opening and the document behind it are exact: they are not computed again
        assert not every.passed
