"""Documents that an encoder stores and cross layers see: no positions, no order, and a reader that stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from kvquilt import Document, Engine
from kvquilt.errors import InputError, WriterMismatchError
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.chunk_encoder import encode
from kvquilt.model.cross_attention import CrossAttention
from kvquilt.model.rows import RowPlan
from kvquilt.placement import place_runs
from kvquilt.prompt import Run
from kvquilt.repair.presets import find_method
from kvquilt.writers.batches import padded
from kvquilt.writers.encoder import Encoder, make_encoder
from tests.engines import QUESTION, at_rest, documents, make_engine
from tests.models import FAMILIES, tiny
from tests.oracle import random_ids
from tests.writers.trained import random_encoder

pytestmark = pytest.mark.usefixtures("nan_slots")
METHOD = "encoder"
on_models = pytest.mark.parametrize("family", ["llama", "qwen3"])


@pytest.fixture
def engine_with() -> Iterator[Callable[..., Engine]]:
    """Makes engines with an encoder; afterwards nothing of them is left on the models, which all tests share."""
    made: list[Engine] = []

    def make(writer: Encoder, family: str = "llama") -> Engine:
        engine = make_engine(family)
        engine.reader = replace(engine.reader, trained={"encoder": writer})
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
        at_rest(engine)


def runs_of(engine: Engine, given: list[Document]) -> tuple[Run, ...]:
    return engine.prompt(QUESTION, given).runs(engine.model.tokenizer)


def logits_of(engine: Engine, given: list[Document], method: str = METHOD) -> torch.Tensor:
    placement = place_runs(runs_of(engine, given))
    out, cache = engine.reader.read(placement, find_method(method), None, Ledger(), 4)
    engine.model.pool.release(cache)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_of_zero_are_the_plain_model_without_documents(engine_with: Callable[..., Engine], family: str) -> None:
    engine = engine_with(random_encoder(tiny(family), gates=0.0), family)
    model = engine.model
    runs = engine.prompt(QUESTION, documents()).runs(model.tokenizer)
    ids = [i for run in runs if run.document is None for i in run.ids]
    with model.pool.lend(len(ids)) as cache:
        plain = model.forward(torch.tensor([ids]), RowPlan(torch.arange(len(ids)), len(ids)), cache)[0]
    assert torch.allclose(logits_of(engine, documents()), plain, atol=1e-5)
    open_gates = engine_with(random_encoder(tiny(family)), family)
    assert not torch.allclose(logits_of(open_gates, documents()), plain, atol=1e-2)


@on_models
def test_order_is_immaterial_and_every_document_counts(engine_with: Callable[..., Engine], family: str) -> None:
    engine = engine_with(random_encoder(tiny(family)), family)
    given = documents()
    here = logits_of(engine, given)
    assert torch.allclose(here, logits_of(engine, given[::-1]), atol=1e-5)
    assert not torch.allclose(here, logits_of(engine, given[1:]), atol=1e-3)


@on_models
def test_a_token_sees_its_whole_document_and_no_padding(family: str) -> None:
    model, cross = tiny(family), random_encoder(tiny(family)).cross
    segments = [random_ids(n, n) for n in (5, 12, 1)]
    together = encode(model, padded(segments), [5, 12, 1], cross)
    for row, ids in enumerate(segments):
        for whole, alone in zip(together, encode(model, padded([ids]), [len(ids)], cross), strict=True):
            assert torch.allclose(whole[:, row, :, : len(ids)], alone[:, 0], atol=1e-5)
    other = [(*segments[1][:-1], segments[1][-1] + 1)]
    keys, _ = encode(model, padded(other), [12], cross)
    assert (keys[:, 0, :, 0] - together[0][:, 1, :, 0]).abs().amin(dim=0).max() > 1e-4, "no causal mask"


@on_models
def test_a_segment_is_a_pair_per_cross_layer(family: str) -> None:
    model, writer = tiny(family), random_encoder(tiny(family), every=2)
    c, segments = model.capability, [random_ids(n, n) for n in (40, 3, 17, 18, 600)]
    for i, segment in writer.compile(model, segments):
        assert segment.ids == segments[i]
        assert segment.keys.shape == segment.values.shape == (c.layers // 2, c.kv_heads, len(segments[i]), c.key_dim)
        assert not segment.keys.is_inference()
        assert not segment.keys.requires_grad
        assert segment.keys.untyped_storage().nbytes() == segment.keys.nbytes


@on_models
def test_documents_are_reused_without_positions_to_the_end_of_the_conversation(
    engine_with: Callable[..., Engine], family: str
) -> None:
    engine, given = engine_with(random_encoder(tiny(family)), family), documents()
    report = engine.compile(given, gate=False, method=METHOD)
    assert report.compiled == len(given)
    assert report.bytes == report.tokens * engine.model.bytes_per_token, "as many cross layers as layers here"
    answer = engine.ask(QUESTION, given, method=METHOD)
    ledger = answer.ledger
    assert ledger.tokens[Provenance.REUSED] == report.tokens
    assert {use.tokens for use in ledger.documents} == {len(r.ids) for r in runs_of(engine, given) if r.document}
    assert ledger.bytes_read["memory"] >= report.bytes
    live = answer._live.cache
    assert live is not None
    assert live.parts.cross is not None
    assert live.parts.cross.tokens == report.tokens
    assert live.filled + len(answer._live.pending) == answer.prompt_tokens - report.tokens + len(answer.token_ids)
    following = answer.follow_up("And then?")
    assert following.prompt_tokens > answer.prompt_tokens
    assert following.ledger.tokens[Provenance.REUSED] > report.tokens


def test_decoding_sees_what_one_pass_sees(engine_with: Callable[..., Engine]) -> None:
    engine, model = engine_with(random_encoder(tiny())), tiny("llama")
    placement = place_runs(runs_of(engine, documents()))
    logits, cache = engine.reader.read(placement, find_method(METHOD), None, Ledger(), 4)
    token = int(logits[-1].argmax())
    stepped = model.forward(torch.tensor([[token]]), cache.tail(1), cache)[0]
    model.pool.release(cache)
    longer = placement.followed_by((token,))
    whole, cache = engine.reader.read(longer, find_method(METHOD), None, Ledger(), 0)
    model.pool.release(cache)
    assert torch.allclose(stepped, whole, atol=1e-5)


@pytest.mark.parametrize(
    "method", ["epic", "cacheblend:1000000", "prophetkv:1000000", "retrieved-document", "samkv:1000000", "ape",
               "infoflow-reorder:1000000", "agentkvshift:1000000"]
)  # fmt: skip
def test_nothing_of_a_document_can_be_computed_again(engine_with: Callable[..., Engine], method: str) -> None:
    engine = engine_with(random_encoder(tiny()))
    written = f"{method},writer=encoder" if ":" in method else f"{method}:writer=encoder"
    with pytest.raises(InputError, match="take no rows"):
        engine.ask(QUESTION, documents(), method=written)


@pytest.mark.parametrize("written", ["none:5%,writer=encoder", "none:order=target_last,writer=encoder",
                                     "none:order=shared_positions,writer=encoder"])  # fmt: skip
def test_budgets_and_orders_change_nothing(engine_with: Callable[..., Engine], written: str) -> None:
    engine = engine_with(random_encoder(tiny()))
    assert torch.allclose(logits_of(engine, documents(), written), logits_of(engine, documents()), atol=1e-5)
    assert engine.ask(QUESTION, documents(), method=written).ledger.spending.charged == 0


def test_a_prompt_of_documents_alone_is_refused(engine_with: Callable[..., Engine]) -> None:
    engine = engine_with(random_encoder(tiny()))
    placement = place_runs([run for run in runs_of(engine, documents()) if run.document is not None])
    with pytest.raises(InputError, match="text beside"):
        engine.reader.check(placement, find_method(METHOD))


def test_the_reader_is_left_as_it_was_whatever_happens(
    engine_with: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = engine_with(random_encoder(tiny())), tiny("llama")
    before = {name: p.detach().clone() for name, p in model.hf.named_parameters()}
    given = documents()
    plain = logits_of(engine, given, "full")
    logits_of(engine, given)

    def fail(*args: object) -> torch.Tensor:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(CrossAttention, "_attended", fail)
        with pytest.raises(RuntimeError, match="planted"):
            logits_of(engine, given)
    at_rest(engine)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.hf.base_model.layers[1].mlp), "forward", fail)
        with pytest.raises(RuntimeError, match="planted"):
            next(random_encoder(tiny(), seed=3).compile(model, [random_ids(9, 9)]))
    at_rest(engine)
    assert torch.equal(logits_of(engine, given, "full"), plain)
    assert all(p is not None and torch.equal(p, before[name]) for name, p in model.hf.named_parameters())
    spare = model.pool.acquire(64)
    assert spare.parts.cross is None
    model.pool.release(spare)


def test_identity_covers_every_tensor_and_the_places_of_the_layers() -> None:
    writer, model = random_encoder(tiny()), tiny("llama")
    named = dict(writer.cross.named)
    assert make_encoder(model.fingerprint, named, 1).digest == writer.digest
    for name in named:
        changed = {**named, name: named[name] + 1e-3}
        assert make_encoder(model.fingerprint, changed, 1).digest != writer.digest, name
    assert make_encoder(model.fingerprint, named, 2).digest != writer.digest
    again = make_encoder(model.fingerprint, named, 1)
    named["cross.0.gate"].add_(1)
    assert float(again.cross.named["cross.0.gate"]) == pytest.approx(0.7), "what is trained on is another tensor"


def test_another_model_is_refused() -> None:
    with pytest.raises(WriterMismatchError, match="what differs: weights"):
        next(random_encoder(tiny("llama")).compile(tiny("llama", 1), [random_ids(5, 5)]))


def test_a_replaced_encoder_misses_and_never_hits_wrongly(engine_with: Callable[..., Engine]) -> None:
    engine, given = engine_with(random_encoder(tiny())), documents(2)
    one = logits_of(engine, given)
    engine.reader = replace(engine.reader, trained={"encoder": random_encoder(tiny(), seed=5)})
    answer = engine.ask(QUESTION, given, method=METHOD)
    assert {use.source for use in answer.ledger.documents} == {"compiled"}
    assert not torch.allclose(one, logits_of(engine, given), atol=1e-3)


def test_operations_of_cross_layers_are_counted(engine_with: Callable[..., Engine]) -> None:
    engine, given = engine_with(random_encoder(tiny())), documents()
    engine.compile(given, gate=False, method=METHOD)
    inline = sum(len(run.ids) for run in runs_of(engine, given)[1:] if run.document is None)
    ledger = engine.ask(QUESTION, given, method=METHOD, max_new_tokens=1).ledger
    cross = random_encoder(tiny()).cross
    weights = sum(t.numel() for name, t in cross.named.items() if name.startswith("cross."))
    assert ledger.flops > 2.0 * inline * (engine.model.layer_weights + weights)
    assert ledger.flops < ledger.flops_full
