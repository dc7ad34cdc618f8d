"""How methods are written: names, options, budgets, and what the error says where one is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from kvquilt.errors import InputError
from kvquilt.placement import Order
from kvquilt.repair.ape import Tempered
from kvquilt.repair.budget import Budget
from kvquilt.repair.everything import Everything
from kvquilt.repair.first_tokens import FirstTokens
from kvquilt.repair.layer_band import LayerBand
from kvquilt.repair.mean_shift import MeanShift
from kvquilt.repair.nothing import Nothing
from kvquilt.repair.post import Expand, Quota
from kvquilt.repair.presets import METHODS, Method, find_method
from kvquilt.repair.random_rows import Random
from kvquilt.repair.retrieved_document import RetrievedDocument
from kvquilt.repair.spread import Spread


def test_the_presets_of_this_page() -> None:
    made = {name: (m.order, m.selector, m.budget, m.correction) for name, m in METHODS.items()}
    fifteen = Budget(share=0.15)
    assert made["full"] == (Order.GIVEN, Everything(), None, None)
    assert made["none"] == (Order.GIVEN, Nothing(), None, None)
    assert made["epic"] == (Order.GIVEN, FirstTokens(16), None, None)
    assert made["random"] == (Order.GIVEN, Random(0), fifteen, None)
    assert made["spread"] == (Order.GIVEN, Spread(), fifteen, None)
    assert made["droidspeak"] == (Order.GIVEN, LayerBand(0, 0), None, None)
    assert made["ape"] == (Order.SHARED_POSITIONS, Nothing(), None, Tempered(0.9, 0.9))
    assert made["agentkvshift"] == (Order.GIVEN, Spread(), fifteen, MeanShift())
    assert made["retrieved-document"] == (Order.TARGET_LAST, RetrievedDocument(1, "tail"), None, None)


@pytest.mark.parametrize("name", METHODS)
def test_a_preset_does_not_reshape_what_its_paper_chooses(name: str) -> None:
    assert METHODS[name].post == ()


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        ("epic:k=8", {"selector": FirstTokens(8)}),
        ("epic: k = 8 ", {"selector": FirstTokens(8)}),
        ("epic:k=8,5%", {"selector": FirstTokens(8), "budget": Budget(share=0.05)}),
        ("epic:5 %,k=8", {"selector": FirstTokens(8), "budget": Budget(share=0.05)}),
        ("epic:k=1e3", {"selector": FirstTokens(1000)}),
        ("epic:", {}),
        ("epic:,", {}),
        ("random:0%", {"budget": Budget(share=0)}),
        ("random:100%", {"budget": Budget(share=1)}),
        ("random:700,seed=3", {"budget": Budget(token_layers=700), "selector": Random(3)}),
        ("random:writer=isolated", {"writer": "isolated"}),
        ("random:order=documents_first", {"order": Order.DOCUMENTS_FIRST}),
        ("random:expand=2,quota=0.5", {"post": (Expand(2), Quota(0.5))}),
        ("random:quota=0.5,expand=2", {"post": (Quota(0.5), Expand(2))}),
        ("droidspeak:first=4,last=8", {"selector": LayerBand(4, 8)}),
        ("ape:temperature=1,scale=0.5", {"correction": Tempered(1.0, 0.5)}),
        ("ape:order=given", {"order": Order.GIVEN}),
        ("retrieved-document:part=head,documents=2", {"selector": RetrievedDocument(2, "head")}),
    ],
)
def test_options_change_what_they_name(written: str, changed: dict[str, object]) -> None:
    preset = METHODS[written.partition(":")[0]]
    assert find_method(written) == dataclasses.replace(preset, name=written, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("epik", "method: unknown method 'epik'; did you mean 'epic'?"),
        ("epik:k=3", "method: unknown method 'epik'; did you mean 'epic'?"),
        ("", "method: unknown method ''; valid: "),
        (" epic", "did you mean 'epic'?"),
        ("auto:5%", "method: auto runs what was measured and takes no options; name a method"),
        ("auto", "method: auto runs what was measured"),
        ("epic:kk=3", "method: epic has no option 'kk'; did you mean 'k'?"),
        ("epic:budget=5%", "method: epic has no option 'budget'"),
        ("epic:probe=none", "method: epic has no option 'probe'"),
        ("epic:granularity=token", "method: epic has no option 'granularity'"),
        ("droidspeak:probe=none", "method: droidspeak has no option 'probe'"),
        ("ape:tempreature=1", "did you mean 'temperature'?"),
        ("epic:temperature=1", "method: epic has no option 'temperature'"),
        ("epic:=3", "method: epic has no option ''"),
        ("epic:k=", "method: k must be a number (got '')"),
        ("epic:k=many", "method: k must be a number (got 'many')"),
        ("epic:k=1.5", "k: must be a whole number (got '1.5')"),
        ("epic:k=nan", "k: must be a whole number (got 'nan')"),
        ("epic:k=inf", "k: must be a whole number (got 'inf')"),
        ("epic:k=-3", "k: must be at least 1 (got -3)"),
        ("random:seed=-1", "seed: must be a whole number from 0"),
        ("random:seed=99999999999999999999", "seed: must be a whole number from 0"),
        ("random:order=last", "order: unknown order 'last'"),
        ("random:order=target-last", "did you mean 'target_last'?"),
        ("random:-5%", "budget: a share lies between 0% and 100% (got '-5%')"),
        ("random:101%", "budget: a share lies between 0% and 100% (got '101%')"),
        ("random:nan%", "budget: write a share such as 5%"),
        ("random:-3", "budget: a number of token-layers is at least 0 (got -3)"),
        ("random:isolated", "budget: write a share such as 5%"),
        ("full:5%", "budget: full prefill computes everything and takes no budget (got '5%')"),
        ("full:0%", "budget: full prefill computes everything and takes no budget"),
        ("random:expnd=3", "did you mean 'expand'?"),
        ("retrieved-document:part=middle", "part: must be tail, head or window (got 'middle')"),
        ("ape:temperature=0", "temperature: must be a finite number above 0"),
    ],
)
def test_an_error_names_the_field_and_the_nearest(written: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        find_method(written)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", [None, 3, ["epic"], METHODS["epic"], b"epic"])
def test_what_is_no_name_is_told_so(name: object) -> None:
    with pytest.raises(InputError, match="method: unknown method"):
        find_method(name)


@pytest.mark.parametrize(
    ("written", "budget", "then"),
    [
        ("epic", "5%", "epic:5%"),
        ("epic:k=8", 0.05, "epic:k=8,5%"),
        ("epic:5%,k=8", "7%", "epic:k=8,7%"),
        ("random:expand=2", 300, "random:expand=2,300"),
        ("epic", None, "epic"),
    ],
)
def test_a_budget_beside_the_name_is_written_into_it(written: str, budget: object, then: str) -> None:
    method = find_method(written).within(budget)
    assert method.name == then
    assert find_method(then) == method


def test_rows_that_are_computed_cannot_share_positions() -> None:
    with pytest.raises(InputError, match=r"order: rows computed again cannot share positions.*mine"):
        Method("mine", Order.SHARED_POSITIONS, Spread(), "none such")
