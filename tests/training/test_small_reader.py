"""The whole path on a reader trained here and now: what is learnt must show."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_reader import ReaderConfig, train_small_reader
from small_task import SYSTEM, exercises

from kvquilt.config import Settings
from kvquilt.engine import Engine
from kvquilt.fidelity import compare, truth
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import weights_digest
from kvquilt.placement import place_runs
from kvquilt.repair.presets import find_method
from kvquilt.store import Store
from kvquilt.template import PromptTemplate
from kvquilt.training.config import TrainConfig
from kvquilt.training.exercise import Exercise
from kvquilt.training.objective import Objective
from kvquilt.training.trainer import Trainer

DOCUMENTS = 2


@pytest.fixture(scope="module")
def reader() -> LanguageModel:
    config = ReaderConfig(layers=3, documents=DOCUMENTS, questions=6, batch=6, steps=80, lr=2e-3)
    hf, tokenizer = train_small_reader(config, 0)
    return LanguageModel.wrap(hf, tokenizer, "small", weights_digest(hf))


def test_a_trained_adapter_brings_the_divergence_down_to_a_fifth(reader: LanguageModel, tmp_path: Path) -> None:
    made = [Exercise(e.documents, e.questions) for e in exercises("train", 64, DOCUMENTS, 6, 1)]
    config = TrainConfig(objective=Objective(dense=10.0), batch=2, micro_batch=2, lr=2e-3, new_tokens=3)
    Trainer(reader, PromptTemplate(reader.tokenizer, SYSTEM), config, made, made[:2], tmp_path / "writer").train()

    divergence = {"none": 0.0, "sempic": 0.0}
    with Engine(
        reader, Store.open(tmp_path / "store", 1 << 28, 1 << 28), Settings(), shared_prefix=False, system=SYSTEM
    ) as engine:
        engine.use(tmp_path / "writer")
        for asked in exercises("test", 16, DOCUMENTS, 1, 2):
            placement = place_runs(engine.prompt(asked.questions[0], asked.documents).runs(reader.tokenizer))
            true = truth(engine, placement, None, 3)
            for method in divergence:
                divergence[method] += float(compare(engine, placement, find_method(method), None, true).kl.mean())

    assert divergence["sempic"] * 5 <= divergence["none"]
