"""Distances of the target's keys and values: by token and in one frame, whatever the arm made of its place."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.evaluation.studies.kv_distance import KVDistance, apart
from kvquilt.evaluation.studies.target_hits import MASS, TargetHits
from kvquilt.evaluation.tasks.item import Item
from tests.engines import at_rest, documents, make_engine

ITEM = Item("item", tuple(documents(4)), "What does the statement do?", ("It",), (1,), "group", "topics")


def test_relative_and_cosine_on_hand_made_rows() -> None:
    full = torch.tensor([[[[3.0, 4.0]]], [[[0.0, 2.0]]]])  # two layers, one head, one row
    mine = torch.tensor([[[[3.0, 4.0]]], [[[2.0, 0.0]]]])
    assert apart(mine, full) == {"l2": [0.0, pytest.approx(2**0.5, abs=1e-4)], "cosine": [1.0, 0.0]}
    # a row's heads are one vector: halves that are swapped between heads are not alike
    heads = torch.tensor([[[[1.0]], [[0.0]]]])
    assert apart(heads.flip(1), heads)["cosine"] == [0.0]


def test_a_document_that_moved_is_compared_in_its_own_frame() -> None:
    engine = make_engine()
    found = KVDistance(engine, ("none", "recompute:target-last", "full")).line(ITEM)
    moved, none, full = (found["arms"][name] for name in ("recompute:target-last", "none", "full"))
    # keys of layer 0 depend on the token alone, wherever it stands
    assert moved["keys"]["l2"][0] < 1e-5
    assert min(moved["keys"]["l2"][1:]) > 1e-3  # it sees other documents before it
    assert min(none["values"]["l2"][1:]) > 1e-3
    assert full["keys"]["l2"] == full["values"]["l2"] == [0.0, 0.0, 0.0]
    at_rest(engine)


def test_what_cannot_run_is_told() -> None:
    engine = make_engine()
    found = KVDistance(engine, ("none", "cacheblend:1%")).line(ITEM)
    assert "probe alone costs" in found["arms"]["cacheblend:1%"]["refused"]
    with pytest.raises(InputError, match="must be known"):
        KVDistance(engine, ("none",)).line(dataclasses.replace(ITEM, gold=()))
    for other in ("full-again", "no-context", "deranged:none", "full-in-order-of:retrieved-document"):
        with pytest.raises(InputError, match="own documents"):
            KVDistance(engine, (other,))
    at_rest(engine)


class _Encoder:
    """Texts are near each other where they begin alike."""

    name = "beginnings"

    def vectors(self, texts: list[str]) -> list[torch.Tensor]:
        return [torch.nn.functional.one_hot(torch.tensor(ord(text[0]) % 97), 97).float() for text in texts]


def test_everybody_looks_at_every_document() -> None:
    engine = make_engine()
    ranked = tuple(dataclasses.replace(document, score=n) for n, document in enumerate(ITEM.documents))
    item = dataclasses.replace(ITEM, documents=ranked)
    scores = TargetHits(engine, _Encoder()).line(item)["scores"]  # type: ignore[arg-type]
    assert sum(scores[MASS]) == pytest.approx(1, abs=1e-4)
    assert set(scores) == {MASS, "attention density", "BM25", "given retriever", "dense"}
    assert scores["given retriever"] == [0.0, 1.0, 2.0, 3.0]
    ratio = [mass / density for mass, density in zip(scores[MASS], scores["attention density"], strict=True)]
    runs = engine.prompt(item.question, item.documents).runs(engine.model.tokenizer)
    lengths = [len(run.ids) for run in runs if run.document is not None]
    assert ratio == pytest.approx(lengths, rel=1e-3)
    at_rest(engine)
