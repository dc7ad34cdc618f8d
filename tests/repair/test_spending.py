"""What every method spends, counted by hooks of the tests' own: never above the budget, and as the ledger says."""

from __future__ import annotations

import json

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger, Provenance
from kvquilt.placement import Placement
from kvquilt.reading import Reader
from kvquilt.repair.presets import METHODS, Method
from tests.oracle import close, full_prefill, runs_of, stock
from tests.repair.methods import (
    REUSING,
    SLOTTED,
    Passed,
    least,
    ordered,
    read,
    reader_of,
    refused,
    roomy,
    rows_passing,
    within,
    wrapped,
)  # fmt: skip

RUNS = runs_of("iABCDi", (7, 40, 31, 24, 37, 5))
OPENING = RUNS[0].ids
SHARES = (0.005, 0.02, 0.05, 0.1, 0.3, 0.7, 1.0)
reusing = pytest.mark.parametrize("name", REUSING)
fronts = pytest.mark.parametrize("preamble", [(), OPENING], ids=["alone", "behind"])


def counted(reader: Reader, placement: Placement, method: Method) -> tuple[torch.Tensor, Ledger, Passed, Passed]:
    """A read whose documents are stored already, from a prompt with another order: logits, ledger, rows by model."""
    read(reader, placement.reordered(placement.documents()[::-1]), roomy(METHODS[method.name]))
    read(reader, placement, method)
    assert reader.helper is not None
    with rows_passing(reader.model) as ours, rows_passing(reader.helper) as helpers:
        out, ledger = read(reader, placement, method)
    assert ledger.forward_tokens["compile"] == 0
    return out, ledger, ours, helpers


def unavoidable(placement: Placement, preamble: tuple[int, ...]) -> int:
    """Token-layers of the inline rows: all but a compiled opening, through three layers."""
    inline = sum(len(run.ids) for run in placement.runs if run.document is None)
    return 3 * (inline - len(preamble))


@pytest.mark.parametrize("name", [name for name in REUSING if name in SLOTTED])
@pytest.mark.parametrize(("family", "preamble"), [("llama", ()), ("gemma3", OPENING)], ids=["alone", "behind"])
def test_no_budget_is_ever_exceeded_and_the_ledger_says_what_hooks_saw(
    family: str, name: str, preamble: tuple[int, ...]
) -> None:
    reader = reader_of(family, preamble)
    ran, spent = 0, None
    for share in SHARES:
        method = within(METHODS[name], share)
        placement = ordered(RUNS, method)
        if (refusal := refused(reader, placement, method)) is not None:
            assert refusal.field == "budget"
            continue
        ran += 1
        out, ledger, ours, helpers = counted(reader, placement, method)
        spent = ledger.spending
        assert spent is not None
        beyond = ours.charge - unavoidable(wrapped(reader, placement, method), preamble)
        assert spent.charged == spent.probe + spent.repair
        assert spent.charged <= spent.allowed == int(share * spent.tokens * 3 + 1e-9)
        assert spent.tokens <= sum(len(run.ids) for run in RUNS if run.document is not None)
        if sum(helpers.entered):
            assert beyond < spent.charged, "another model's work is charged on top"
        else:
            assert spent.charged == beyond
        assert ledger.token_layers == sum(ours.entered)
        assert sum(ledger.tokens.values()) == placement.tokens
        assert ledger.tokens[Provenance.RECOMPUTED] == spent.rows
        assert spent.nominal_share == pytest.approx(spent.rows / max(1, spent.tokens))
        assert bool(torch.isfinite(out).all())
    assert spent is not None
    assert spent.tokens, "nothing to spend on: the budgets above were not tried"
    assert ran, "not even 100 % pays for its probe on this prompt"


@fronts
@reusing
def test_the_least_possible_really_is_the_least(name: str, preamble: tuple[int, ...]) -> None:
    reader, method = reader_of(preamble=preamble), METHODS[name]
    placement = ordered(RUNS, method)
    enough = least(reader, placement, method)
    _, ledger, ours, _ = counted(reader, placement, within(method, token_layers=enough))
    assert ledger.spending is not None
    assert ledger.spending.charged <= enough
    assert ours.charge - unavoidable(wrapped(reader, placement, method), preamble) <= enough
    if enough:
        with pytest.raises(InputError, match=rf"the least possible is {enough}\b"):
            reader.check(placement, within(method, token_layers=enough - 1))
        assert ledger.spending.probe > 0
        assert enough - ledger.spending.probe <= 3 + enough // 20, "a least far above what the probe takes"


@pytest.mark.parametrize("name", SLOTTED)
def test_estimated_work_follows_the_rows_and_all_of_them_are_a_full_prefill(name: str) -> None:
    reader = reader_of()
    method = within(METHODS[name], share=1.0) if METHODS[name].reuses else METHODS[name]
    placement = ordered(RUNS, method)
    out, ledger, ours, helpers = counted(reader, placement, method)
    whole, model = 3 * placement.tokens, reader.model
    if sum(ours.finished) == whole == sum(ours.entered) and not sum(helpers.entered):
        assert ledger.flops == pytest.approx(ledger.flops_full, rel=0.01)
        assert close(out, full_prefill(stock(), placement.ids)[-1:])
        return
    least = 2.0 * model.layer_weights / 3 * ours.charge
    pairs = 2.0 * model.capability.heads * 2 * model.capability.key_dim * sum(ours.entered) * placement.tokens
    helped = 2.0 * reader.helper.layer_weights / 3 * sum(helpers.entered) if reader.helper is not None else 0.0
    assert least + helped <= ledger.flops <= least + 2 * helped + pairs + 2.0 * model.head_weights


@reusing
def test_the_account_of_a_repair_survives_json(name: str) -> None:
    _, ledger, _, _ = counted(reader_of(), ordered(RUNS, METHODS[name]), roomy(METHODS[name]))
    assert ledger.spending is not None
    data = json.loads(json.dumps(ledger.as_dict()))
    again = Ledger.from_dict(data)
    assert again == ledger
    assert again.spending == ledger.spending
    assert again.spending.charged_share == ledger.spending.charged_share
    assert f"charged {ledger.spending.charged} token-layers" in ledger.table() or not ledger.spending.charged
