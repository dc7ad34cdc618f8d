"""Full prefill's keys and values in place of what is stored, and the document that the question looks at."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kvquilt.evaluation.run.attended import AttendedDocument, document_attention
from kvquilt.evaluation.run.config import RunConfig
from kvquilt.evaluation.run.run import Run
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.ledger import Ledger
from kvquilt.placement import place_runs
from kvquilt.repair.presets import METHODS, find_method
from kvquilt.repair.retrieved_document import RetrievedDocument
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe
from kvquilt.request import Request
from tests.engines import at_rest, documents, make_engine

ITEM = Item("item", tuple(documents(4)), "What does the statement do?", ("It",), (1, 2), "group", "topics")


def distances(folder: Path, item: Item, *methods: str) -> dict[str, float]:
    engine = make_engine()
    config = RunConfig(("none", *methods), Metric("contains_em"), new_tokens=4)
    found = Run(engine, [item], config, folder).go()
    at_rest(engine)
    assert found.refused == {}
    return {line["method"]: max(line["fidelity"]["self"]["kl"]) for line in found.lines[2:]}


def test_all_documents_inserted_are_full_prefill(tmp_path: Path) -> None:
    everything = dataclasses.replace(ITEM, gold=(0, 1, 2, 3))
    found = distances(tmp_path, everything, "insert:target", "recompute:target", "insert:others=3")
    assert found["none"] > 1e-3
    assert found["insert:target"] < 1e-5
    assert found["recompute:target"] < 1e-5
    assert found["insert:others=3"] == found["none"]  # there are no others


def test_computed_behind_what_is_reused_is_not_what_full_prefill_has(tmp_path: Path) -> None:
    behind = distances(tmp_path / "behind", dataclasses.replace(ITEM, gold=(2,)), "insert:target", "recompute:target")
    assert len(set(behind.values())) == 3
    # the first document is exact: behind it alone, both are the same
    first = distances(tmp_path / "first", dataclasses.replace(ITEM, gold=(1,)), "insert:target", "recompute:target")
    assert first["insert:target"] == pytest.approx(first["recompute:target"], abs=1e-6)
    assert first["none"] > first["insert:target"] + 1e-3


def test_the_others_are_not_the_target(tmp_path: Path) -> None:
    # the first document is exact, so the last is the only other that differs
    others = distances(tmp_path / "others", dataclasses.replace(ITEM, gold=(0, 1, 2)), "insert:others=1")
    last = distances(tmp_path / "last", dataclasses.replace(ITEM, gold=(3,)), "insert:target")
    assert others["insert:others=1"] == last["insert:target"] != last["none"]


class _Caught(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class _Catch:
    """A selector that only keeps its scene."""

    scenes: list[Scene]
    probe: Probe = Probe.QUESTION
    granularity: Granularity = Granularity.DOCUMENT

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        self.scenes.append(scene)
        raise _Caught


def test_the_document_with_most_attention_is_computed_and_its_probe_charged() -> None:
    engine, scenes = make_engine(), []
    runs = engine.prompt(ITEM.question, ITEM.documents).runs(engine.model.tokenizer)
    method = dataclasses.replace(METHODS["none"], selector=_Catch(scenes))
    request = Request(engine.reader, place_runs(runs), method, 1, None)
    with pytest.raises(_Caught):
        request.read(Ledger(), 1)
    (scene,) = scenes
    mass = document_attention(scene)
    assert list(mass) == scene.placement.documents()
    assert sum(mass.values()) == pytest.approx(1, abs=1e-5)
    assert len({round(each, 6) for each in mass.values()}) == 4
    selector = AttendedDocument(RetrievedDocument())
    assert scene.charged == selector.least(scene) > 0
    chosen = selector.choose(scene).ranking
    best = scene.placement.span(max(mass, key=lambda run: mass[run]))
    exact = scene.placement.span(scene.placement.documents()[0])
    expected = [] if best == exact else list(best)
    assert sorted(chosen.tolist()) == expected
    torch.testing.assert_close(selector.choose(scene).ranking, chosen)
    request.release()


def test_a_probe_that_cannot_be_paid_for_is_refused_and_counted(tmp_path: Path) -> None:
    dear, cheap = (f"attended:retrieved-document:{budget},order=given" for budget in ("1%", "100000"))
    config = RunConfig(("none", dear, cheap), Metric("contains_em"), new_tokens=4)
    lines = {line["method"]: line for line in Run(make_engine(), [ITEM], config, tmp_path).go().lines}
    assert "probe alone costs" in lines[dear]["refused"]
    assert lines[cheap]["ledger"]["spending"]["probe"] > 0
    assert find_method("retrieved-document").needs_ranking
