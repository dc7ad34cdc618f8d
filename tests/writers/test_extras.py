"""Side data against what a stock model attends to and computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.model import attention_rows as rows_module
from kvquilt.model.attention_rows import attention_rows
from kvquilt.model.counter import RowCounter
from kvquilt.model.rows import RowPlan, Watcher
from kvquilt.segment import CompiledSegment
from kvquilt.writers.attention_statistics import AttentionStatistics
from kvquilt.writers.chunk_scores import ChunkScores, document_digest
from kvquilt.writers.digest import Digest
from kvquilt.writers.extra import Extra
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.residual import Residual
from tests.models import tiny
from tests.oracle import random_ids
from tests.writers.eager import attention_maps, hidden_states

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "mistral-window")
on_models = pytest.mark.parametrize("family", FAMILIES)
PREFIX, IDS = random_ids(70, 1), random_ids(41, 2)
SPANS = ((7, 30), (33, 61))

pytestmark = pytest.mark.usefixtures("nan_slots")


def compiled(writer: Isolated, family: str = "llama", ids: tuple[int, ...] = IDS) -> CompiledSegment:
    [(_, segment)] = writer.compile(tiny(family), [ids])
    return segment


class Collected(Watcher):
    """All weights of a forward, put together from their blocks."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []
        self.blocks = 0

    def attends(
        self, layer: int, plan: RowPlan, query: torch.Tensor, keys: torch.Tensor, scaling: float, window: int | None
    ) -> None:
        whole = torch.zeros(query.shape[1], query.shape[2], keys.shape[2])
        for block, weights in attention_rows(query, keys, plan.current.slots, scaling, window):
            whole[:, block, : weights.shape[2]] = weights
            self.blocks += 1
        self.layers.append(whole)


@on_models
@pytest.mark.parametrize("block", [1, 4 * 60 * 7, 1 << 23])
@pytest.mark.parametrize("rows", [range(60), range(41, 60), [3, 4, 40, 59]])
def test_weights_are_those_of_the_stock_model_whatever_the_blocks(
    family: str, block: int, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_BLOCK_WEIGHTS", block)
    ids, model, seen = random_ids(60, 3), tiny(family), Collected()
    with model.pool.lend(60) as cache:
        model.forward(torch.tensor([ids]), RowPlan(torch.arange(60), 60), cache, 0)
        some = torch.tensor(list(rows))
        model.forward(torch.tensor([ids])[:, some], RowPlan(some, 60, watcher=seen), cache, 0)
    truth = attention_maps(family, ids)[:, :, some]
    assert torch.allclose(torch.stack(seen.layers).double(), truth, atol=1e-5)
    per_layer = -(-len(some) // max(1, block // (4 * 60)))
    assert seen.blocks == 3 * per_layer


@on_models
def test_attention_statistics_are_those_of_the_stock_model(family: str) -> None:
    segment = compiled(Isolated(PREFIX, (AttentionStatistics(SPANS),)), family)
    mean = attention_maps(family, PREFIX + IDS).mean((0, 1))[len(PREFIX) :]
    inter = torch.stack([mean[:, a:b].sum() for a, b in SPANS])
    outside = sum(mean[:, a:b].sum(-1) for a, b in SPANS)
    assert segment.side["outside"].dtype == torch.float32
    assert torch.allclose(segment.side["outside"].double(), outside, atol=1e-5)
    assert torch.allclose(segment.side["inter"].double(), inter, atol=1e-4)
    assert torch.allclose(segment.side["intra"].double(), mean[:, len(PREFIX) :].sum()[None], atol=1e-4)
    assert float(outside.max()) > 0.01, "a prefix nobody attends to would prove nothing"


def test_statistics_name_the_earlier_documents() -> None:
    segment = compiled(Isolated(PREFIX, (AttentionStatistics(SPANS),)))
    scores = ChunkScores.of(segment.side, segment.tokens)
    assert scores.earlier == tuple(document_digest(PREFIX[a:b]) for a, b in SPANS)
    assert scores.lengths == (23, 28)
    assert scores.tokens == 41
    assert scores.inter == tuple(segment.side["inter"].tolist())
    assert scores.share(1.0, scores.earlier) == 0.0
    assert 0.5 <= scores.share(1.0, ()) < 1.0


def test_without_earlier_documents_nothing_is_outside() -> None:
    side = compiled(Isolated(PREFIX[:9], (AttentionStatistics(),))).side
    assert side["outside"].tolist() == [0.0] * 41
    assert side["inter"].shape == (0,)
    assert side["earlier"].shape == (0, 32)
    assert 0 < float(side["intra"]) < 41, "the rest went to the prefix"


@on_models
@pytest.mark.parametrize("share", [0.15, 0.5, 1.0])
def test_a_digest_has_the_tokens_that_the_instruction_attends_to(family: str, share: float) -> None:
    instruction = random_ids(11, 4)
    segment = compiled(Isolated(PREFIX, (Digest(instruction, share),)), family)
    truth = attention_maps(family, PREFIX + IDS + instruction)[:, :, -11:, 70:111].sum((1, 2))
    found = segment.side["digest"]
    count = {0.15: 7, 0.5: 21, 1.0: 41}[share]
    assert (found.dtype, found.shape) == (torch.int32, (3, count))
    for layer in range(3):
        got = truth[layer][found[layer].long()]
        best = truth[layer].sort(descending=True).values[:count]
        assert torch.allclose(got, best, atol=1e-5), "best first"
        assert len(set(found[layer].tolist())) == count


def test_a_digest_of_one_token_is_that_token() -> None:
    assert compiled(Isolated((), (Digest((5,)),)), ids=(9,)).side["digest"].tolist() == [[0]] * 3


def test_a_share_that_is_a_whole_number_of_tokens_is_not_rounded_up() -> None:
    for share, tokens, count in ((0.15, 20, 3), (0.07, 100, 7), (0.15, 21, 4), (0.29, 100, 29)):
        side = compiled(Isolated((), (Digest((5,), share),)), ids=random_ids(tokens, 1)).side
        assert side["digest"].shape[1] == count


@on_models
@pytest.mark.parametrize("layer", [1, 2])
def test_residuals_are_what_enters_the_layer(family: str, layer: int) -> None:
    segment = compiled(Isolated(PREFIX, (Residual(layer),)), family)
    found = segment.side[f"residual-{layer}"]
    truth = hidden_states(family, PREFIX + IDS)[layer][len(PREFIX) :]
    assert found.dtype == segment.keys.dtype
    assert found.shape == (41, 64)
    assert torch.allclose(found, truth, atol=1e-4)


@on_models
def test_keys_and_values_do_not_depend_on_what_is_noted(family: str) -> None:
    extras = (Residual(1), Digest((7, 8)), AttentionStatistics(SPANS))
    plain, noted = compiled(Isolated(PREFIX), family), compiled(Isolated(PREFIX, extras), family)
    assert torch.allclose(plain.keys, noted.keys, atol=1e-5)
    assert torch.allclose(plain.values, noted.values, atol=1e-5)
    assert (plain.start, plain.prefix) == (noted.start, noted.prefix)


def test_a_repeated_instruction_is_counted() -> None:
    plain, noted = RowCounter(), RowCounter()
    dict(Isolated().compile(tiny(), [IDS], plain))
    dict(Isolated((), (Digest((7, 8, 9)),)).compile(tiny(), [IDS], noted))
    assert noted.rows == plain.rows + 3


def test_every_setting_is_another_writer_and_their_order_is_none() -> None:
    extras: list[tuple[Extra, ...]] = [
        (),
        (Residual(1),),
        (Residual(2),),
        (Residual(1), Residual(2)),
        (Digest((1,)),),
        (Digest((1, 2)),),
        (Digest((1,), 0.2),),
        (AttentionStatistics(),),
        (AttentionStatistics(((0, 3),)),),
        (AttentionStatistics(((0, 2), (2, 3))),),
        (AttentionStatistics(((0, 3),)), Residual(1)),
    ]
    digests = [Isolated(prefix, each).digest for prefix in ((), (1, 2, 3), (1, 2, 4)) for each in extras]
    assert len(set(digests)) == len(digests)
    assert Isolated((), (Residual(1), Residual(2))).digest == Isolated((), (Residual(2), Residual(1))).digest


def test_a_writer_without_extras_is_the_writer_it_always_was() -> None:
    assert Isolated().digest == "dba8a887d6f10b3fabc2f2adfb985c9d4782f297b036f6c5f35847faf285b344"
    assert Isolated((1, 2, 3)).digest == "bba68a9b8385b8ca0e7729b2263fc4f42cde63bee73ba0764f7609b408b567f3"


@pytest.mark.parametrize("spans", [((3, 3),), ((5, 9), (8, 12)), ((9, 12), (1, 3)), ((-1, 2),), ((4, 2),)])
def test_spans_that_are_no_documents_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InputError, match="documents"):
        AttentionStatistics(spans)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="documents"):
        compiled(Isolated(PREFIX[:20], (AttentionStatistics(SPANS),)))
    with pytest.raises(InputError, match="layers 0 to 2"):
        compiled(Isolated((), (Residual(3),)))
    with pytest.raises(InputError, match="layer"):
        Residual(0)
    with pytest.raises(InputError, match="instruction"):
        Digest(())
    for share in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="share"):
            Digest((1,), share)
    with pytest.raises(InputError, match="extras"):
        Isolated((), (Digest((1,)), Digest((2,))))


def test_a_refused_compile_gives_its_slots_back() -> None:
    lent = tiny().pool.lent
    with pytest.raises(InputError):
        compiled(Isolated(PREFIX, (Residual(3),)))
    assert tiny().pool.lent == lent
