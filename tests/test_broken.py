"""Faults that were found by trying to break things, each held by a test."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, Qwen2MoeConfig
from typer.testing import CliRunner

from kvquilt import Document, Prompt
from kvquilt.accounting import full_flops
from kvquilt.cli.app import app
from kvquilt.config import Settings
from kvquilt.decode import Sampling
from kvquilt.errors import ConfigError, ContextLengthError, InputError, UnsupportedModelError
from kvquilt.ledger import Provenance
from kvquilt.model.attention import attend
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan, active
from kvquilt.model.single_row import SingleRowProducts
from kvquilt.model.steps import Steps
from kvquilt.placement import place_runs
from kvquilt.repair.plan import cut
from kvquilt.repair.presets import METHODS
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice
from kvquilt.store import Store
from tests.engines import QUESTION, at_rest, documents, make_engine
from tests.models import model_from, tiny
from tests.oracle import runs_of
from tests.repair.methods import ordered, read, reader_of, within
from tests.tokenizers import chatml_tokenizer


def test_a_stream_can_be_cancelled_from_another_thread_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine() as engine:
        before = engine.model.pool.lent
        stream = engine.stream(QUESTION, documents(), method="none", max_new_tokens=40)
        real, faults = Steps.step, []

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

        monkeypatch.setattr(Steps, "step", step)
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


def windowed_moe(window: int) -> LanguageModel:
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "pad_token_id": 0}
    fields |= {"shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": window}
    hf = model_from(Qwen2MoeConfig, {**fields, "layer_types": ["sliding_attention"] * 3})
    return LanguageModel.wrap(hf, chatml_tokenizer(), "moe", "weights")


def test_a_window_that_only_the_model_s_mask_knows_is_refused() -> None:
    """Qwen2-MoE masks its window and does not hand it to attention, so all slots would have been seen."""
    with pytest.raises(UnsupportedModelError, match=r"layer 0 a window of 24.*called with None"):
        windowed_moe(24)
    assert windowed_moe(1024).capability.max_length == 1024, "a window that is never reached harms nobody"


def test_the_refusal_of_another_layout_does_not_call_it_recurrent() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no self-attention named `self_attn`.*another layout"):
        LanguageModel.wrap(model_from(GPTNeoXConfig, {}), chatml_tokenizer(), "neox", "weights")


@pytest.mark.parametrize("rows", [torch.arange(5), torch.arange(2, 5), torch.tensor([4])], ids=len)
def test_attention_gives_the_memory_layout_that_models_expect(rows: torch.Tensor) -> None:
    """Stock attention is contiguous, and some models take a view of it."""
    query, key = torch.randn(1, 4, len(rows), 8), torch.randn(1, 2, 5, 8)
    with active(RowPlan(rows, 5)):
        out, _ = attend(torch.nn.Module(), query, key, key, None)
    assert out.view(1, len(rows), -1).shape == (1, len(rows), 32)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tenant": "a\ud800"}, "tenant"),
        ({"method": 5}, "method"),
        ({"method": ["none"]}, "method"),
        ({"policy": 5}, "policy"),
    ],
)
def test_options_of_another_kind_are_input_errors(options: dict[str, Any], field: str) -> None:
    with make_engine() as engine:
        with pytest.raises(InputError) as caught:
            engine.ask(QUESTION, documents(), **{"method": "none", **options})
        assert caught.value.field == field
    with pytest.raises(InputError, match="score"):
        Document("text", score=10**400)


def test_a_long_list_of_what_to_drop_is_cut_and_says_if_it_is_not_enough() -> None:
    many = [Document(f"fact {n} " * 3, id=f"d{n}") for n in range(200)]
    with make_engine() as engine:
        with pytest.raises(ContextLengthError, match=r"drop ('d\d+' \(\d+ tokens\), ){7}.* and \d+ more$"):
            engine.ask(QUESTION, many, method="none")
        with pytest.raises(ContextLengthError, match=r"drop 'only' .* and shorten the prompt"):
            engine.ask(Prompt([Document("short", id="only"), "word " * 2000]), method="none")


@pytest.mark.parametrize("where", ["store_dir", "config"])
def test_a_home_that_does_not_exist_is_a_config_error(where: str) -> None:
    with pytest.raises(ConfigError, match="no home directory"):
        Settings.resolve("~nobody-here/x") if where == "config" else Settings.resolve(None, {where: "~nobody-here/x"})


def test_a_config_nested_too_deeply_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: " + "[" * 5000)
    with pytest.raises(ConfigError, match="not valid YAML"):
        Settings.resolve(tmp_path / "c.yaml")


@pytest.mark.parametrize("account", [{"tokens": 5}, {"documents": [{"id": 5}]}])
def test_a_damaged_account_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account: Any) -> None:
    line = {"tokens": 1, "start": 0, "provenance": "exact", "source": "disk", "why": ""}
    account = {"fallbacks": [], **account, "documents": [line | each for each in account.get("documents", [])]}
    (tmp_path / "last-answer.json").write_text(json.dumps({"ledger": account}))
    monkeypatch.setenv("KVQUILT_CACHE_DIR", str(tmp_path))
    outcome = CliRunner().invoke(app, ["explain"], prog_name="kvquilt")
    assert outcome.exit_code == 2
    assert "cannot be read" in outcome.stderr


def test_rm_by_key_keeps_to_the_namespace_and_needs_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(directory=tmp_path) as engine:
        engine.compile(documents(1), tenant="a", gate=False)
        [mine] = engine.store.ls()
    monkeypatch.setenv("KVQUILT_STORE_DIR", str(tmp_path))
    for key in ("", f"{mine.key.namespace}/", f"{'0' * 32}/{mine.key.digest[:6]}"):
        assert CliRunner().invoke(app, ["store", "rm", key], prog_name="kvquilt").exit_code == 2
    with Store.open(tmp_path, 0) as store:
        assert len(store.ls()) == 1
    assert CliRunner().invoke(app, ["store", "rm", mine.key.digest[:6]], prog_name="kvquilt").exit_code == 0


def test_a_layer_s_forward_that_somebody_else_replaced_is_called_and_stays() -> None:
    """As accelerate does to move weights; it was bypassed for every decoded bf16 token, and then gone."""
    layer = torch.nn.Linear(8, 8)
    hooked = layer.__dict__["forward"] = lambda rows: torch.full_like(rows, 7.0)
    with torch.inference_mode(), SingleRowProducts(layer).installed():
        assert torch.equal(layer(torch.ones(1, 1, 8)), torch.full((1, 1, 8), 7.0))
    assert layer.__dict__["forward"] is hooked


def test_a_document_that_turns_exact_by_reordering_takes_its_share_of_the_budget_along() -> None:
    """Documents ordered by what was chosen: the one that then stands first is exact, and none to spend on."""
    runs = runs_of("iABCi", (7, 31, 24, 37, 5))
    reader, method = reader_of(preamble=runs[0].ids), within(METHODS["infoflow-reorder"], 0.3)
    _, ledger = read(reader, ordered(runs, method), method)
    spent = ledger.spending
    assert spent is not None
    assert spent.tokens < 31 + 24 + 37
    assert spent.allowed == int(0.3 * spent.tokens * 3)
    assert spent.charged_share <= 0.3
    alone = ordered([runs[0], runs[1], runs[4]], method)
    _, ledger = read(reader, alone, within(METHODS["infoflow-reorder"], 0.0))
    assert ledger.spending is not None
    assert (ledger.spending.tokens, ledger.spending.charged) == (0, 0), "one document cannot change places"


def test_rows_that_start_before_a_band_are_charged_for_the_layers_before_it() -> None:
    placement = place_runs(runs_of("iABi", (3, 17, 15, 4)))
    scene = Scene(tiny(), placement, [1, 2], [placement.span(0), placement.span(3)])
    resumed = scene.slots[:4]
    choice = Choice(scene.slots, first=2, entering=(resumed, torch.zeros(4, 64)))
    assert len(cut(choice, (), scene, 4)) == 4, "one layer each"
    assert len(cut(choice, (), scene, 4 + 3 * 5 + 2)) == 4 + 5, "the others start at layer 0"
    assert len(cut(Choice(scene.slots, first=1, last=2), (), scene, 10)) == 5


def test_dropped_tokens_are_in_the_account_of_every_later_turn() -> None:
    with make_engine() as engine:
        docs = documents(3)
        answer = engine.ask(QUESTION, docs, method="samkv:60%", max_new_tokens=2)
        absent = answer.ledger.tokens[Provenance.ABSENT]
        assert absent > 0
        for _ in range(2):
            before = answer.prompt_tokens
            answer = answer.follow_up("And?", max_new_tokens=2)
            assert answer.ledger.tokens[Provenance.ABSENT] == absent
            assert answer.prompt_tokens == sum(answer.ledger.tokens.values()) > before
            assert answer.ledger.flops_full == full_flops(engine.model, answer.prompt_tokens)
