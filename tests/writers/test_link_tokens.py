from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvquilt.errors import ContextLengthError, InputError, WriterMismatchError
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.parts import SOFT
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Run
from kvquilt.reading import Reader
from kvquilt.repair.presets import Method, find_method
from kvquilt.request import Request
from kvquilt.store import Store
from kvquilt.writers.artefact import load_writer
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.link_tokens import LinkTokens
from kvquilt.writers.loaded import load_all, paired
from tests.engines import MEMORY
from tests.models import tiny
from tests.oracle import close, far, runs_of, stock

FAMILIES = ("llama", "qwen3", "gemma3", "mistral-window", "phi3-partial")
on_families = pytest.mark.parametrize("family", FAMILIES)
RUNS = runs_of("iABiCi", (5, 30, 17, 3, 21, 9))


def with_links(written: str) -> Method:
    return replace(find_method(written), writer="link-tokens")


METHOD = with_links("none")


def links_of(family: str = "llama", sets: int = 1, each: int = 3, seed: int = 0, size: float = 1.0) -> LinkTokens:
    model = tiny(family)
    width = model.hf.get_input_embeddings().weight.shape[1]
    drawn = torch.randn(sets, each, width, generator=torch.Generator().manual_seed(seed)) * size
    return LinkTokens.of(model.fingerprint, drawn)


def reader_of(links: LinkTokens, family: str = "llama", store: Store | None = None) -> Reader:
    kept = store or Store.open(None, MEMORY, None)
    return Reader(tiny(family), kept, Isolated(), (), trained={"link-tokens": links})


def read(reader: Reader, placement: Placement, method: Method = METHOD) -> tuple[torch.Tensor, Ledger, Placement]:
    ledger = Ledger()
    request = Request(reader, placement, method, 4, None)
    logits = request.read(ledger, 8)
    request.release()
    return logits, ledger, request.placement


@torch.inference_mode()
def one_pass(family: str, placement: Placement, links: LinkTokens) -> torch.Tensor:
    """Logits of a stock model in one forward under trained.md's mask: nothing is compiled, nothing is moved."""
    hf = stock(family)
    table = hf.get_input_embeddings()
    ids = torch.tensor(placement.ids)
    soft = links.links.flatten(0, 1)
    embedded = torch.where((ids >= SOFT)[:, None], soft[(ids - SOFT).clamp_min(0)], table(ids.where(ids < SOFT, 0)))
    part = torch.cat([torch.full((len(run.rows),), n) for n, run in enumerate(placement.runs)])
    inline = torch.cat([torch.full((len(run.rows),), run.document is None) for run in placement.runs])
    at = torch.arange(len(ids))
    causal = at[None] <= at[:, None]
    visible = causal & (inline[:, None] | (part[None] == part[:, None]))
    masks = {}
    window = getattr(hf.config, "sliding_window", None)
    for name, seen in (
        ("full_attention", visible),
        ("sliding_attention", visible & (at[:, None] - at[None] < (window or len(ids)))),
    ):
        masks[name] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    mixed = getattr(hf.config, "layer_types", None) is not None and family == "gemma3"
    given = masks if mixed else masks["sliding_attention" if window else "full_attention"]
    out = hf(inputs_embeds=embedded[None], attention_mask=given, position_ids=at[None], use_cache=False)
    return out.logits[0].float()


@on_families
@pytest.mark.parametrize("sets", [1, 4])
def test_what_is_served_is_one_forward_under_the_block_mask(family: str, sets: int) -> None:
    links = links_of(family, sets)
    logits, _, placement = read(reader_of(links, family), place_runs(RUNS))
    assert [len(run.ids) for run in placement.runs] == [5, 30, 3, 17, 3, 3, 21, 3, 9]
    assert close(logits, one_pass(family, placement, links)[-4:])


def test_the_links_matter_and_each_place_has_its_own_if_there_are_several_sets() -> None:
    shared, own = links_of(), links_of(sets=3)
    same = LinkTokens.of(own.base, own.links[:1].expand(3, -1, -1))
    plain, _, _ = read(reader_of(shared), place_runs(RUNS), find_method("none"))
    first, others, repeated = (read(reader_of(links), place_runs(RUNS))[0] for links in (shared, own, same))
    assert far(first, plain) > 0.05
    assert far(others, repeated) > 0.05
    assert torch.equal(read(reader_of(LinkTokens.of(own.base, own.links[:1])), place_runs(RUNS))[0], repeated)


@on_families
def test_a_link_sees_its_own_document_all_earlier_ones_and_no_later_one(family: str) -> None:
    links, runs = links_of(family), runs_of("ABC", (12, 11, 10))
    kept = []
    for spoiled in (None, 0, 1, 2):
        changed = [replace(run, ids=run.ids[::-1]) if n == spoiled else run for n, run in enumerate(runs)]
        request = Request(reader_of(links, family), place_runs([*changed, Run((7, 8))]), METHOD, 1, None)
        request.read(Ledger(), 0)
        span = request.placement.span(3)
        kept.append(request.scene.placed.slot_values[-1, 0, :, span.start : span.stop].clone())
        request.release()
    plain, first, second, third = kept
    assert torch.equal(plain, third), "the middle link saw a later document"
    assert far(second, plain) > 1e-2
    assert far(first, plain) > (1e-4 if family in ("gemma3", "mistral-window") else 1e-2)


def test_what_is_stored_is_the_isolated_writers() -> None:
    store = Store.open(None, MEMORY, None)
    read(reader_of(links_of(), store=store), place_runs(RUNS), find_method("none"))
    rows = {row.key for row in store.ls()}
    for seed in (0, 1):
        _, ledger, _ = read(reader_of(links_of(seed=seed), store=store), place_runs(RUNS))
        assert ledger.forward_tokens["compile"] == 0
    assert {row.key for row in store.ls()} == rows


def test_links_are_computed_shown_and_charged_to_nobody() -> None:
    plain, linked = (
        read(reader_of(links_of(each=4)), place_runs(RUNS), name)[1] for name in (find_method("none"), METHOD)
    )
    assert linked.tokens == plain.tokens
    assert (plain.soft_rows, linked.soft_rows) == (0, 3 * 4)
    assert linked.forward_tokens["read"] == plain.forward_tokens["read"] + 3 * 4
    assert linked.spending is not None
    assert linked.spending.charged == 0
    assert len(linked.documents) == 3


@pytest.mark.parametrize("method", ["infoflow-reorder", "ape"])
def test_documents_that_stand_side_by_side_have_no_place_for_links(method: str) -> None:
    placement = place_runs(RUNS, find_method(method).order)
    with pytest.raises(InputError, match="between the documents"):
        Request(reader_of(links_of()), placement, with_links(method), 1, None)


def test_more_documents_than_places_and_a_prompt_that_only_links_make_too_long_are_refused() -> None:
    with pytest.raises(InputError, match="at most 2"):
        Request(reader_of(links_of(sets=2)), place_runs(RUNS), METHOD, 1, None)
    longest = tiny().capability.max_length
    reader = reader_of(links_of(each=2))
    reader.check(place_runs(runs_of("Ai", (longest - 12, 10))), METHOD)
    with pytest.raises(ContextLengthError, match="soft tokens"):
        reader.check(place_runs(runs_of("Ai", (longest - 11, 10))), METHOD)


def test_methods_compose_with_links_and_never_choose_them() -> None:
    full = read(reader_of(links_of()), place_runs(RUNS))[0]
    for method in ("epic:k=4", "prophetkv:60%", "cacheblend:80%", "samkv:50%"):
        logits, ledger, placement = read(reader_of(links_of()), place_runs(RUNS), with_links(method))
        assert far(logits, full) > 1e-3
        assert ledger.tokens[Provenance.INLINE] == 5 + 3 + 9
        assert ledger.soft_rows == 3 * 3
        assert sum(ledger.tokens.values()) + ledger.soft_rows == placement.tokens


def test_all_rows_computed_with_links_is_one_causal_forward_over_them() -> None:
    links = links_of()
    logits, _, placement = read(reader_of(links), place_runs(RUNS), with_links("random:100%"))
    hf, ids = stock(), torch.tensor(placement.ids)
    with torch.inference_mode():
        table = hf.get_input_embeddings()(ids.where(ids < SOFT, 0))
        given = torch.where((ids >= SOFT)[:, None], links.links[0][(ids - SOFT).clamp_min(0)], table)
        truth = hf(inputs_embeds=given[None], use_cache=False).logits[0, -4:]
    assert close(logits, truth)


def test_links_of_another_model_are_refused_and_any_change_is_another_identity() -> None:
    links = links_of()
    with pytest.raises(WriterMismatchError, match="weights"):
        links.check(tiny(seed=1))
    links.check(tiny())
    changed = links.links.clone()
    changed[0, 0, 0] += 1e-3
    others = [LinkTokens.of(links.base, changed), LinkTokens.of(links.base, links.links, (5,))]
    assert len({links.content, *(each.content for each in others)}) == 3
    for bad in (links.links[0], links.links[:, :0], links.links * torch.nan):
        with pytest.raises(InputError, match="sets, each, width"):
            LinkTokens.of(links.base, bad)


def test_a_folder_gives_the_same_links_again(tmp_path: Path) -> None:
    links = LinkTokens.of(tiny().fingerprint, links_of(sets=2).links, (5, 6), "tiny")
    assert links.save(tmp_path, {"lr": 1.0}) == links.content
    again = load_writer(tmp_path, tiny())
    assert isinstance(again, LinkTokens)
    assert again == links
    assert torch.equal(again.links, links.links)
    assert again.base_name == "tiny"
    pairs = paired([tmp_path, f"law={tmp_path}"])
    assert list(load_all(pairs, tiny())) == ["link-tokens", "law"]
    with pytest.raises(WriterMismatchError, match="weights"):
        load_writer(tmp_path, tiny(seed=1))
