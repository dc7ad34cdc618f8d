"""The writer's pass: checkpointed gradients are the direct ones, whatever happens between forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from kvquilt.model.graph import frozen, read, write
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.packed import side_by_side
from kvquilt.model.parts import PLAIN, Adapter, Parts, parts_of, soft_ids
from kvquilt.model.rows import Pair, RowPlan
from tests.models import tiny
from tests.writers.trained import SHAPES, random_parts

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
ALPHA = 4.0
Named = dict[str, torch.nn.Parameter]


def parameters(model: LanguageModel, kind: str = "joint", seed: int = 0) -> Named:
    return {name: torch.nn.Parameter(t) for name, t in random_parts(model, *SHAPES[kind], seed).items()}


def documents(named: Named, lengths: Sequence[int] = (9, 70, 5)) -> list[tuple[int, ...]]:
    """Wrapped; the long one has more rows than one block of attention and than a window."""
    draw = torch.Generator().manual_seed(3)
    header, trailer = (len(named.get(name, ())) for name in ("header", "trailer"))
    return [
        soft_ids(header) + tuple(torch.randint(4, 90, (n,), generator=draw).tolist()) + soft_ids(trailer, header)
        for n in lengths
    ]


def prefix_of(model: LanguageModel, length: int = 6) -> list[Pair]:
    with torch.no_grad():
        return [(k.detach(), v.detach()) for k, v in write(model, [tuple(range(20, 20 + length))], PLAIN)]


def loss_of(pairs: Sequence[Pair], only: slice = slice(None)) -> torch.Tensor:
    """Something that looks at every key and value differently."""
    draw = torch.Generator().manual_seed(5)
    total = torch.zeros(())
    for pair in pairs:
        for t in pair:
            total = total + (t * torch.randn(t.shape, generator=draw))[:, :, only].sum()
    return total


def gradients(named: Named, run: Callable[[], object]) -> dict[str, torch.Tensor]:
    """What `run` adds to the gradients of `named`, zero where nothing."""
    for p in named.values():
        p.grad = None
    run()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}


def straight(
    model: LanguageModel, named: Named, behind: Sequence[Pair] = (), keep_all: bool = True
) -> dict[str, torch.Tensor]:
    def run() -> None:
        loss_of(write(model, documents(named), parts_of(named, ALPHA), behind, keep_all=keep_all)).backward()

    with frozen(model):
        return gradients(named, run)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    apart = sum(float((a[name] - b[name]).square().sum()) for name in b)
    return float((apart / sum(float(t.square().sum()) for t in b.values())) ** 0.5)


@pytest.mark.parametrize("prefix", [0, 6])
@pytest.mark.parametrize("kind", sorted(SHAPES))
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_gradients_are_the_direct_ones(family: str, kind: str, prefix: int) -> None:
    model = tiny(family)
    named, behind = parameters(model, kind), prefix_of(model, prefix) if prefix else []
    assert distance(straight(model, named, behind, keep_all=False), straight(model, named, behind)) < 1e-6


@pytest.mark.parametrize("prefix", [0, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_is_written_as_if_it_were_alone_and_a_prefix_is_not_changed(family: str, prefix: int) -> None:
    model = tiny(family)
    named, behind = parameters(model), prefix_of(model, prefix) if prefix else []
    kept = [(k.clone(), v.clone()) for k, v in behind]
    parts = parts_of(named, ALPHA)
    both, again = (write(model, documents(named), parts, behind) for _ in range(2))
    first = 0
    for ids in documents(named):
        alone = write(model, [ids], parts, behind)
        for (k, v), (own_k, own_v), (k2, v2) in zip(both, alone, again, strict=True):
            assert torch.equal(k, k2)
            assert torch.equal(v, v2)
            mine = slice(first, first + len(ids))
            assert torch.allclose(k[:, :, mine], own_k, atol=1e-5)
            assert torch.allclose(v[:, :, mine], own_v, atol=1e-5)
        first += len(ids)
    assert all(
        torch.equal(a, b) for now, before in zip(behind, kept, strict=True) for a, b in zip(now, before, strict=True)
    )


def test_rows_that_nobody_reads_have_no_influence() -> None:
    model = tiny()
    named = parameters(model)
    packets = documents(named)
    short = len(packets[0])

    def run(written: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
        with frozen(model):
            pairs = write(model, written, parts_of(named, ALPHA))
            return gradients(named, lambda: loss_of([(k[:, :, :short], v[:, :, :short]) for k, v in pairs]).backward())

    assert distance(run(packets), run(packets[:1])) < 1e-5


def test_only_query_and_output_of_the_last_layer_lack_gradients() -> None:
    model = tiny()
    named = parameters(model, "sempic")
    with frozen(model):
        loss_of(write(model, documents(named), parts_of(named, ALPHA))).backward()
    without = {name.rsplit(".", 1)[0] for name, p in named.items() if p.grad is None}
    last = f"layers.{model.capability.layers - 1}.self_attn"
    assert without == {f"{last}.q_proj", f"{last}.o_proj"}
    assert all(p.grad is None or float(p.grad.abs().max()) > 0 for p in named.values())


def test_b_learns_first_and_a_one_step_later() -> None:
    model = tiny()
    named = parameters(model, "sempic")
    for name, p in named.items():
        if name.endswith("lora_B"):
            torch.nn.init.zeros_(p)
    dead = [
        name
        for name in named
        if f"layers.{model.capability.layers - 1}." in name and ("q_proj" in name or "o_proj" in name)
    ]
    alive = [name for name in named if name not in dead]
    found = straight(model, named, keep_all=False)
    assert all(bool(found[name].any()) == name.endswith("lora_B") for name in alive)
    with torch.no_grad():
        for name in alive:
            named[name] -= 0.1 * found[name]
    found = straight(model, named, keep_all=False)
    assert all(bool(found[name].any()) for name in alive)


def test_backward_brings_its_own_adapter_on_whatever_thread() -> None:
    model = tiny("qwen3")
    named = parameters(model)
    with frozen(model):
        loss = loss_of(write(model, documents(named), parts_of(named, ALPHA)))
        assert not any(module._forward_hooks for module in model.hf.modules())

        def elsewhere() -> None:
            worker = threading.Thread(target=loss.backward)
            worker.start()
            worker.join()

        found = gradients(named, elsewhere)
    assert distance(found, straight(model, named)) < 1e-6


def test_a_backward_behind_the_frozen_block_is_refused() -> None:
    """Weights that want gradients again keep other tensors: it cannot go on by mistake."""
    model = tiny()
    named = parameters(model)
    with frozen(model):
        loss = loss_of(write(model, documents(named), parts_of(named, ALPHA)))
    with pytest.raises(CheckpointError):
        loss.backward()


def test_two_adapters_keep_apart_however_their_passes_interleave() -> None:
    model = tiny()
    one, other = parameters(model, "sempic", 0), parameters(model, "sempic", 1)
    with frozen(model):
        first = loss_of(write(model, documents(one), parts_of(one, ALPHA)))
        second = loss_of(write(model, documents(other), parts_of(other, ALPHA)))
        found = gradients(one, first.backward), gradients(other, second.backward)
    assert distance(found[0], straight(model, one)) < 1e-6
    assert distance(found[1], straight(model, other)) < 1e-6


@dataclass(frozen=True, eq=False, slots=True)
class _Forgetful(Adapter):
    """The classic mistake: on in the forward, off when a layer runs again. `by` says how it is switched off."""

    by: str = "flag"
    seen: set[str] = field(default_factory=set)

    @contextmanager
    def on(self, base: torch.nn.Module, within: str = "") -> Iterator[None]:
        again = within in self.seen
        self.seen.add(within)
        if not again:
            with Adapter.on(self, base, within):
                yield
        elif self.by == "flag":
            yield
        else:
            with Adapter(self.pairs, 0.0).on(base, within):
                yield


def _with_trap(model: LanguageModel, named: Named, by: str) -> dict[str, torch.Tensor]:
    adapter = parts_of(named, ALPHA).adapter
    assert isinstance(adapter, Adapter)
    trapped = Parts(_Forgetful(adapter.pairs, adapter.scaling, by))
    with frozen(model):
        loss = loss_of(write(model, documents(named), trapped))
        return gradients(named, loss.backward)


def test_an_adapter_that_is_off_when_layers_run_again_is_found_out() -> None:
    model = tiny()
    named = parameters(model, "sempic")
    with pytest.raises(CheckpointError):
        _with_trap(model, named, "flag")


def test_an_adapter_scaled_to_nothing_when_layers_run_again_gives_wrong_gradients_silently() -> None:
    """What the comparison of gradients above is there to catch."""
    model = tiny()
    named = parameters(model, "sempic")
    wrong = _with_trap(model, named, "scaling")
    assert distance(wrong, straight(model, named)) > 0.1


def test_nothing_is_left_on_the_model_after_an_exception_in_the_middle() -> None:
    model = tiny()
    named = parameters(model)
    ids, plan = torch.arange(20, 40)[None], RowPlan(torch.arange(20), 20)

    def logits() -> torch.Tensor:
        with model.pool.lend(20) as cache:
            return model.forward(ids, plan, cache, 20)

    before = logits()
    flags = [p.requires_grad for p in model.hf.parameters()]

    def stop(*args: object) -> None:
        raise KeyError("stop")

    hook = model.hf.base_model.layers[1].mlp.register_forward_hook(stop)  # type: ignore[index, union-attr]
    with pytest.raises(KeyError, match="stop"), frozen(model):
        write(model, documents(named), parts_of(named, ALPHA))
    hook.remove()
    assert [p.requires_grad for p in model.hf.parameters()] == flags
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.hf.modules())
    assert torch.equal(logits(), before)
    straight(model, named)
    assert torch.equal(logits(), before)
    assert all(p.grad is None for p in model.hf.parameters())


def _stop(model: LanguageModel) -> None:
    assert not any(p.requires_grad for p in model.hf.parameters())
    raise KeyError("stop")


def test_frozen_gives_back_the_flags_it_found() -> None:
    model = tiny()
    some = next(iter(model.hf.parameters()))
    some.requires_grad_(False)
    try:
        with pytest.raises(KeyError), frozen(model):
            _stop(model)
        assert [p.requires_grad for p in model.hf.parameters()].count(False) == 1
        assert not some.requires_grad
    finally:
        some.requires_grad_(True)


@pytest.mark.parametrize("family", [*FAMILIES, "mistral-window"])
def test_reading_sequences_side_by_side_is_reading_each(family: str) -> None:
    """Rows in the middle of what is in front are computed, too."""
    model, lengths = tiny(family), (3, 66, 1)
    draw = torch.Generator().manual_seed(0)
    ahead = torch.randint(4, 90, (30,), generator=draw)
    own = [torch.randint(4, 90, (n,), generator=draw) for n in lengths]
    front = torch.tensor([4, 5, 17])
    with frozen(model), torch.no_grad():
        nothing = [(torch.empty(1, k.shape[1], 0, k.shape[3]),) * 2 for k, _ in prefix_of(model, 1)]
        plan = side_by_side(lengths, len(ahead), front)
        # what the rows' slots hold is never looked at
        slots = [(torch.full((1, k.shape[1], plan.filled, k.shape[3]), float("nan")),) * 2 for k, _ in nothing]
        slots = [(k.clone(), v.clone()) for k, v in slots]
        others = [slot for slot in range(len(ahead)) if slot not in front.tolist()]
        for (k, v), (own_k, own_v) in zip(slots, write(model, [tuple(ahead.tolist())], PLAIN), strict=True):
            k[:, :, others], v[:, :, others] = own_k[:, :, others], own_v[:, :, others]
        both = read(model, torch.cat((ahead[front], *own))[None], plan, slots, len(plan.rows), hidden=True)
        first = len(front)
        for n, mine in enumerate(own):
            ids = torch.cat((ahead, mine))
            alone = read(model, ids[None], RowPlan(torch.arange(len(ids)), len(ids)), nothing, len(mine), hidden=True)
            assert torch.allclose(both.logits[0, first : first + len(mine)], alone.logits[0], atol=1e-4)
            for found, wanted in zip(both.hidden, alone.hidden, strict=True):
                rows = torch.cat((front, torch.arange(len(ahead), len(ids))))
                assert torch.allclose(found[n], wanted[0, rows], atol=1e-4)
            first += len(mine)
