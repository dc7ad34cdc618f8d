"""A second, small model says which rows to compute again: its attention, its cost, and every way it cannot."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvquilt import Document, Engine
from kvquilt.config import Settings
from kvquilt.errors import ContextLengthError, InputError, PromptError
from kvquilt.ledger import Ledger
from kvquilt.model.language_model import LanguageModel
from kvquilt.offsets import render
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Prompt, Run
from kvquilt.reading import Reader
from kvquilt.repair.helper_model import HelperModel
from kvquilt.repair.presets import find_method
from kvquilt.repair.scene import Scene
from kvquilt.store import Store
from kvquilt.tokens import encoder
from kvquilt.writers.isolated import Isolated
from tests.engines import QUESTION, SETTINGS, at_rest, documents, make_engine
from tests.models import build, tiny
from tests.oracle import runs_of
from tests.test_gate import LENIENT
from tests.test_offsets import characters_of
from tests.tokenizers import bytes_only, chatml_tokenizer, metaspace, word_piece

TEXTS = ("The quick brown fox 🙂 jumps.", "日本語の文章。 e\u0301 naïve café", "A context manager is an object")


@functools.cache
def helper_with(kind: str, family: str = "qwen2", seed: int = 3, **sizes: int) -> LanguageModel:
    tokenizer = {"bytes": bytes_only, "metaspace": metaspace, "words": word_piece, "chatml": chatml_tokenizer}[kind]()
    hf = build(family, seed, vocab_size=len(tokenizer), **sizes)
    return LanguageModel.wrap(hf, tokenizer, f"helper-{kind}", f"weights {kind} {family} {seed} {sizes}")


def prompt(texts: Sequence[str] = TEXTS) -> Placement:
    parts = ["Read this.", *(Document(text, id=str(n)) for n, text in enumerate(texts)), "\nWhat is it?"]
    return place_runs(Prompt(parts).runs(chatml_tokenizer()))


def scene_of(placement: Placement, helper: LanguageModel | None, first: int = 0) -> Scene:
    """All documents from the one at `first` on may be spent on."""
    inline = [placement.span(i) for i, run in enumerate(placement.runs) if run.document is None]
    return Scene(tiny(), placement, placement.documents()[first:], inline, helper=helper)


@torch.inference_mode()
def received(family: str, seed: int, vocabulary: int, ids: Sequence[int], asking: int, layer: int) -> torch.Tensor:
    """``[tokens]`` attention from the last `asking` rows in a stock model, summed over heads and rows."""
    hf: PreTrainedModel = build(family, seed, vocab_size=vocabulary)
    hf.set_attn_implementation("eager")
    out = hf(input_ids=torch.tensor([list(ids)]), output_attentions=True, use_cache=False)
    total: torch.Tensor = out.attentions[layer][0, :, -asking:].double().sum((0, 1))
    return total


def carried(truth: torch.Tensor, scene: Scene, theirs: Any, starts: Sequence[int]) -> list[list[float]]:
    """Scores of every spendable token: the largest of those with a byte of one of its characters, from `starts` on."""
    out = []
    for i, at in zip(scene.spendable, starts, strict=True):
        document = scene.placement.runs[i].document
        assert document is not None
        text = document.text + document.end
        held = characters_of(theirs, text)
        ours = characters_of(chatml_tokenizer(), text)
        out.append([max(float(truth[at + j]) for j, c in enumerate(held) if c & own) for own in ours])
    return out


def by_group(scores: Sequence[Sequence[float]], spans: Sequence[range], group: int) -> list[int]:
    """Slots ranked by the mean of their group, groups within documents; of equals the earlier slot first."""
    rated = []
    for each, span in zip(scores, spans, strict=True):
        for at in range(0, len(span), group):
            part = each[at : at + group]
            rated += [(-sum(part) / len(part), slot) for slot in span[at : at + group]]
    return [slot for _, slot in sorted(rated, key=lambda pair: (round(pair[0], 6), pair[1]))]


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("family", "layer"), [("qwen2", -1), ("qwen3", 1), ("gemma3", -2), ("gemma3", -1)])
def test_rows_rank_by_the_attention_of_the_question(family: str, layer: int, group: int) -> None:
    """One tokenizer for both: only tokens that are pieces of one character share their scores."""
    placement = prompt()
    scene = scene_of(placement, helper_with("chatml", family), first=1)
    choice = HelperModel(layer=layer, group=group).choose(scene)
    asking = len(placement.runs[-1].ids)
    truth = received(family, 3, len(chatml_tokenizer()), placement.ids, asking, layer)
    scores = carried(truth, scene, chatml_tokenizer(), [placement.span(i).start for i in scene.spendable])
    assert choice.ranking.tolist() == by_group(scores, scene.spans, group)
    assert sorted(choice.ranking.tolist()) == scene.slots.tolist()


def test_scores_are_carried_to_the_readers_tokens_by_characters() -> None:
    """A helper that reads bytes; which characters tokens share is read from the vocabularies."""
    placement, helper = prompt(), helper_with("bytes")
    scene = scene_of(placement, helper)
    choice = HelperModel(group=3).choose(scene)
    rendering = render(placement.runs, chatml_tokenizer(), bytes_only())
    assert bytes(rendering.ids).decode() == "Read this." + "".join(f"{text}\n" for text in TEXTS) + "\nWhat is it?"
    asking = len(b"\nWhat is it?")
    truth = received("qwen2", 3, len(bytes_only()), rendering.ids, asking, -1)
    starts = [len(b"Read this.") + sum(len(f"{t}\n".encode()) for t in TEXTS[:n]) for n in range(len(TEXTS))]
    scores = carried(truth, scene, bytes_only(), starts)
    assert choice.ranking.tolist() == by_group(scores, scene.spans, 3)


def test_a_helper_whose_tokens_begin_with_spaces_ranks_every_row() -> None:
    scene = scene_of(prompt(), helper_with("metaspace"))
    ranking = HelperModel().choose(scene).ranking
    assert sorted(ranking.tolist()) == scene.slots.tolist()
    assert torch.equal(ranking, HelperModel().choose(scene_of(prompt(), helper_with("metaspace"))).ranking)


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize(
    "helper",
    [("chatml", {}), ("bytes", {}), ("bytes", {"hidden_size": 32, "intermediate_size": 48}),
     ("metaspace", {"num_hidden_layers": 5, "intermediate_size": 256})],
)  # fmt: skip
def test_its_products_are_charged_in_the_readers_token_layers(helper: tuple[str, dict[str, int]], layer: int) -> None:
    placement, model, reader = prompt(), helper_with(helper[0], **helper[1]), tiny()
    scene = scene_of(placement, model)
    selector = HelperModel(layer=layer)
    least = selector.least(scene)
    assert scene.charged == 0, "known without running anything"
    selector.choose(scene)
    assert scene.charged == scene.besides == least
    tokens = len(render(placement.runs, reader.tokenizer, model.tokenizer).ids)
    sizes = [(n, p.numel()) for n, p in model.hf.base_model.layers.named_parameters()]
    whole = sum(count for _, count in sizes) / model.capability.layers
    projected = sum(c for n, c in sizes if any(f"{p}_proj" in n for p in "qkv")) / model.capability.layers
    depth = layer % model.capability.layers
    flops = 2 * (tokens * depth * whole + tokens * projected)
    per_layer = 2 * sum(p.numel() for p in reader.hf.base_model.layers.parameters()) / reader.capability.layers
    assert flops / per_layer <= least < flops / per_layer + 1 + 2 * whole / per_layer


def read(placement: Placement, method: str, helper: LanguageModel) -> Ledger:
    reader = Reader(tiny(), Store.open(None, 1 << 28), Isolated(), (), helper=helper)
    ledger, lent = Ledger(), (tiny().pool.lent, helper.pool.lent)
    _, cache = reader.read(placement, find_method(method), None, ledger, 0)
    reader.model.pool.release(cache)
    assert (tiny().pool.lent, helper.pool.lent) == lent
    return ledger


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_a_request_spends_what_the_helper_left(kind: str) -> None:
    helper = helper_with(kind, hidden_size=32, intermediate_size=48)
    least = HelperModel().least(scene_of(prompt(), helper))
    spent = read(prompt(), f"cacheclip:group=4,{least + 33}", helper).spending
    assert spent is not None
    assert spent.probe == least
    assert spent.rows == 33 // spent.layers
    assert spent.repair == spent.rows * spent.layers


def test_two_looks_are_charged_twice() -> None:
    helper = helper_with("chatml", hidden_size=32, intermediate_size=48)
    spent = read(prompt(), "cacheclip:order=density_ascending,100000", helper).spending
    assert spent is not None
    assert spent.probe == 2 * HelperModel().least(scene_of(prompt(), helper))


def test_the_reader_may_be_its_own_helper() -> None:
    scene = scene_of(prompt(), tiny())
    least = HelperModel().least(scene)
    assert least < scene.placement.tokens * scene.layers, "the last layer is not computed whole"
    spent = read(prompt(), "cacheclip:100000", tiny()).spending
    assert spent is not None
    assert spent.probe == least


def test_a_prompt_that_ends_with_a_document_is_asked_by_its_last_row() -> None:
    parts = ["Read.", Document("The quick brown fox", id="a"), Document("the lazy dog", id="b", end="")]
    placement = place_runs(Prompt(parts).runs(chatml_tokenizer()))
    inline = [placement.span(0), range(placement.tokens - 1, placement.tokens)]
    scene = Scene(tiny(), placement, placement.documents(), inline, helper=helper_with("chatml"))
    choice = HelperModel(group=1).choose(scene)
    truth = received("qwen2", 3, len(chatml_tokenizer()), placement.ids, 1, -1)
    scores = [truth[span.start : span.stop].tolist() for span in scene.spans]
    assert choice.ranking.tolist() == by_group(scores, scene.spans, 1)


def test_nothing_to_spend_on_costs_nothing() -> None:
    placement = prompt()
    scene = scene_of(placement, helper_with("bytes"), first=len(TEXTS))
    assert HelperModel().least(scene) == 0
    assert HelperModel().choose(scene).ranking.tolist() == []
    assert scene.charged == 0


def test_without_a_helper_it_is_said_how_to_give_one_before_anything_is_computed() -> None:
    engine = make_engine(helper=None)
    with pytest.raises(InputError, match=r"helper_model: .*--helper-model.*Engine.load\(.*helper=") as caught:
        engine.ask(QUESTION, documents(), method="cacheclip")
    assert caught.value.field == "helper_model"
    with pytest.raises(InputError, match="helper_model"):
        engine.doctor(documents(), methods=["cacheclip"])
    assert engine.store.ls() == []
    at_rest(engine, lent=engine.model.pool.lent)
    engine.close()


def test_a_prompt_too_long_for_the_helper_is_refused_with_numbers() -> None:
    helper = helper_with("bytes", max_position_embeddings=64)
    tokens = len(render(prompt().runs, chatml_tokenizer(), bytes_only()).ids)
    with pytest.raises(ContextLengthError, match=rf"{tokens} of its tokens .* context of 64: {tokens - 64} too many"):
        HelperModel().least(scene_of(prompt(), helper))


def test_text_that_cannot_be_aligned_is_refused_before_anything_is_computed() -> None:
    run = prompt().runs[1]
    placement = place_runs([Run((3,)), Run((*run.ids, 5), run.document), Run((7, 8))])
    reader = Reader(tiny(), Store.open(None, 1 << 28), Isolated(), (), helper=helper_with("bytes"))
    with pytest.raises(PromptError, match=r"helper_model: .*cannot be aligned") as caught:
        reader.check(placement, find_method("cacheclip"))
    assert "fox" not in str(caught.value)


def test_a_helper_that_cannot_read_parts_is_refused() -> None:
    with pytest.raises(PromptError, match=r"helper_model: helper-words cannot read this prompt: .*must join"):
        HelperModel().least(scene_of(prompt(), helper_with("words")))


@pytest.mark.parametrize("layer", [3, -4])
def test_a_layer_that_the_helper_lacks_is_refused(layer: int) -> None:
    with pytest.raises(InputError, match="layer: the helper model helper-bytes has 3 layers"):
        HelperModel(layer=layer).least(scene_of(prompt(), helper_with("bytes")))


def test_a_group_holds_a_token() -> None:
    with pytest.raises(InputError, match="group: must be at least 1"):
        find_method("cacheclip:group=0")


def test_a_budget_below_the_helpers_own_work_says_the_least_possible() -> None:
    with make_engine(helper=helper_with("bytes")) as engine:
        with pytest.raises(InputError, match="the least possible is") as caught:
            engine.ask(QUESTION, documents(), method="cacheclip", budget=1)
        least = int(str(caught.value).partition("the least possible is ")[2].split()[0].rstrip(","))
        with pytest.raises(InputError, match="the least possible is"):
            engine.ask(QUESTION, documents(), method="cacheclip", budget=least - 1)
        spent = engine.ask(QUESTION, documents(), method="cacheclip", budget=least).ledger.spending
        assert spent is not None
        assert (spent.rows, spent.charged) == (0, least)


def test_a_verdict_holds_for_the_helper_it_was_measured_with() -> None:
    store = Store.open(None, 1 << 28)

    def engine(helper: LanguageModel | None) -> Engine:
        return Engine(tiny(), store, LENIENT, helper=helper, conversations=0)

    first, other = helper_with("chatml", hidden_size=32, intermediate_size=48), helper_with("bytes")
    report = engine(first).doctor(documents(), prompts=3, methods=["cacheclip:500", "none"])
    assert all(v.passed and v.prompts == 3 for v in report.verdicts)
    ask: dict[str, Any] = {"method": "cacheclip:500", "policy": "auto"}
    assert engine(first).ask(QUESTION, documents(), **ask).ledger.method == "cacheclip:500"
    for helper in (other, None):
        ledger = engine(helper).ask(QUESTION, documents(), **ask).ledger
        assert (ledger.method, [f.reason for f in ledger.fallbacks]) == ("full", ["gate_refused"])
        assert engine(helper).ask(QUESTION, documents(), method="none", policy="auto").ledger.method == "none"
    engine(None).doctor(documents(), prompts=3, methods=["none"])
    kept = engine(first).verdict()
    assert kept is not None
    assert kept.verdict("cacheclip:500") == report.verdicts[0], "another engine's run has not dropped it"


def test_a_method_that_cannot_run_on_a_sample_prompt_gets_no_verdict_and_the_others_get_theirs() -> None:
    """The question of the first check is one character long; those that are measured are longer."""
    engine = make_engine(helper=helper_with("bytes"), settings=LENIENT)
    with pytest.raises(InputError) as caught:
        engine.doctor(documents(), prompts=3, methods=["cacheclip:0"])
    least = str(caught.value).partition("the least possible is ")[2].split()[0]
    report = engine.doctor(documents(), prompts=3, methods=[f"cacheclip:{least}", "none"])
    refused, measured = report.verdicts
    assert (refused.passed, refused.prompts) == (False, 0)
    assert "cannot run on every sample prompt: budget" in refused.reason
    assert measured.prompts == 3
    ledger = engine.ask(QUESTION, documents(), method=f"cacheclip:{least}", policy="auto").ledger
    assert ledger.method == "full"
    assert "cannot run on every sample prompt" in ledger.fallbacks[0].detail
    engine.close()


def test_an_engine_loads_its_helper_and_one_name_is_one_model(tmp_path: Path) -> None:
    for name, tokenizer in (("reader", chatml_tokenizer()), ("helper", bytes_only())):
        build("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    reader, helper = str(tmp_path / "reader"), str(tmp_path / "helper")
    settings = SETTINGS.model_copy(update={"store_dir": tmp_path / "store", "cache_dir": tmp_path})
    with Engine.load(reader, settings=settings) as engine:
        assert engine.reader.helper is None
    with Engine.load(reader, settings=settings, helper=helper) as engine:
        assert engine.reader.helper is not None
        assert len(engine.reader.helper.tokenizer) == len(bytes_only())
        spent = engine.ask(QUESTION, documents(), method="cacheclip:300000").ledger.spending
        assert spent is not None
        assert spent.probe > 0
    named = Settings.resolve(flags={**dict(settings), "helper_model": reader})[0]
    with Engine.load(reader, settings=named) as engine:
        assert engine.reader.helper is engine.model


def test_documents_of_random_tokens_are_those_of_their_text() -> None:
    """What the shared suites read: else a helper could not be among them."""
    for run in runs_of("AiBC", (40, 3, 1, 17)):
        if run.document is not None:
            assert encoder(chatml_tokenizer()).spans(run.document.text)[0] == run.ids
