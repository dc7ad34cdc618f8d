"""The three real models, where the settings' `models_dir` or the cache has them: endpoints, answers, the account.

``smollm2``, ``qwen`` and ``gemma`` are found as folders or GGUF files whose name contains theirs; a GGUF is unpacked
into the cache once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvquilt import Engine
from kvquilt.config import Settings
from kvquilt.endpoints import check_endpoints
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import load_model
from kvquilt.placement import place_runs
from kvquilt.repair.operator import repair
from kvquilt.repair.presets import METHODS
from kvquilt.repair.selector import Probe
from kvquilt.writers.recipes import KINDS
from tests.engines import AFFORDABLE, PLAIN, QUESTION, at_rest, documents, make_engine, stored_bytes
from tests.oracle import close, full_prefill

NAMES = {"smollm2": "smol", "qwen": "qwen", "gemma": "gemma"}


def found(name: str) -> tuple[Path, Settings]:
    """A folder or GGUF file of the model; skips with the reason where there is none."""
    settings = Settings.resolve()[0]
    places = [settings.models_dir, settings.cache_dir / "models"]
    for place in places:
        entries = list(place.iterdir()) if place is not None and place.is_dir() else []
        for path in sorted(entries, key=lambda p: (p.suffix == ".gguf", p.name)):
            if NAMES[name] in path.name.lower() and (path.suffix == ".gguf" or (path / "config.json").exists()):
                return path, settings
    pytest.skip(f"{name}: neither in models_dir (KVQUILT_MODELS_DIR) nor unpacked in the cache")


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    path, settings = found(request.param)
    return load_model(str(path), settings=settings)


@pytest.fixture
def engine(model: LanguageModel, tmp_path: Path) -> Iterator[Engine]:
    with make_engine(model, tmp_path) as made:
        yield made
    assert model.pool.lent == 0


def test_every_endpoint_check_passes(engine: Engine) -> None:
    checks = check_endpoints(engine, documents(2))
    assert len(checks) >= 5
    assert all(c.passed for c in checks), checks


def test_answers_are_repeatable_accounted_for_and_leave_the_store_alone(engine: Engine) -> None:
    docs = documents(4)
    engine.compile(docs, gate=False)
    # the prompt is short, so probes are more than the presets' shares; a helper model would be a second real one, and
    # nothing is trained for these models
    methods = {
        name: written
        for name, written in AFFORDABLE.items()
        if METHODS[name].selector.probe is not Probe.HELPER and METHODS[name].writer not in KINDS
    }
    answers = {name: engine.ask(QUESTION, docs, method=methods[name], max_new_tokens=6) for name in methods}
    before = stored_bytes(engine)
    for name, first in answers.items():
        stream = engine.stream(QUESTION, docs, method=methods[name], max_new_tokens=6)
        assert "".join(stream) == stream.answer.text
        ledger = stream.answer.ledger
        assert stream.answer.token_ids == first.token_ids
        assert ledger.forward_tokens["compile"] == 0
        assert sum(ledger.tokens.values()) == first.prompt_tokens
        if name in PLAIN:
            computed = ledger.tokens[Provenance.INLINE] + ledger.tokens[Provenance.RECOMPUTED]
            assert ledger.forward_tokens["read"] == computed
    assert answers["none"].ledger.tokens[Provenance.REUSED] > 0
    assert stored_bytes(engine) == before
    at_rest(engine, conversations=1)


def test_one_document_is_exact_behind_the_opening(engine: Engine) -> None:
    """In half precision other kernels round otherwise, so distributions are compared and not tokens."""
    docs = documents(1)
    runs = engine.prompt(QUESTION, docs).runs(engine.model.tokenizer)
    out = {}
    for name in ("full", "none"):
        ledger = Ledger()
        logits, cache = engine.reader.read(place_runs(runs), METHODS[name], None, ledger, 0)
        engine.model.pool.release(cache)
        out[name] = logits.log_softmax(-1)
    assert ledger.tokens[Provenance.REUSED] == 0
    kl = float((out["full"].exp() * (out["full"] - out["none"])).sum(-1).mean())
    assert kl < (1e-5 if engine.model.dtype == torch.float32 else 5e-2)


def test_smollm2_in_fp32_equals_the_stock_model() -> None:
    """Case 23's contract on a real model: logits within 1e-4 of the stock ones and the same greedy answer."""
    path, settings = found("smollm2")
    if path.suffix == ".gguf":
        pytest.skip("only a GGUF file is here; unpacking it in a second dtype would take too long")
    ours = load_model(str(path), dtype="float32", settings=settings)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with make_engine(ours) as engine:
        docs = documents(2)
        ids = engine.prompt(QUESTION, docs).ids(ours.tokenizer)
        cache = ours.pool.acquire(len(ids))
        repair(ours, cache, ids, [range(len(ids))], 0)
        out = repair(ours, cache, ids, [range(2, len(ids))], 20)
        ours.pool.release(cache)
        assert close(out, full_prefill(stock, ids)[-20:])
        answer = engine.ask(QUESTION, docs, method="full", max_new_tokens=8)
        generated = stock.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=8, do_sample=False,
        )[0, len(ids) :].tolist()  # fmt: skip
        assert list(answer.token_ids) == [t for t in generated if t not in ours.stop_ids]
