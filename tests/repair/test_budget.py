"""Budgets as people write them, and what they allow."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvquilt.errors import InputError
from kvquilt.repair.budget import Budget


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("5%", Budget(share=0.05)),
        ("5 %", Budget(share=0.05)),
        ("  5%\n", Budget(share=0.05)),
        ("2.5%", Budget(share=0.025)),
        ("2.%", Budget(share=0.02)),
        (".5%", Budget(share=0.005)),
        ("0%", Budget(share=0.0)),
        ("100%", Budget(share=1.0)),
        ("13000", Budget(token_layers=13000)),
        (" 13000 ", Budget(token_layers=13000)),
        ("0", Budget(token_layers=0)),
        (0.05, Budget(share=0.05)),
        (1.0, Budget(share=1.0)),
        (1, Budget(token_layers=1)),
        (0, Budget(token_layers=0)),
        (Budget(share=0.3), Budget(share=0.3)),
    ],
)
def test_what_is_written_is_what_is_meant(written: object, meant: Budget) -> None:
    assert Budget.parse(written) == meant


@pytest.mark.parametrize(
    "written",
    ["", " ", "%", "5 percent", "5%%", "5%5%", "five", "nan", "nan%", "inf%", "1e3", "0x10", "5,5%", "0.05", "1_000",
     "+5%", "--5%", "5\n0", "9" * 5000, None, True, False, [5], {"share": 0.05}, b"5%", 5j],
)  # fmt: skip
def test_what_is_no_budget_is_told_how_one_is_written(written: object) -> None:
    with pytest.raises(InputError, match=r"budget: write a share such as 5%, or a whole number of token-layers"):
        Budget.parse(written)


@pytest.mark.parametrize("written", ["-5%", "100.1%", "101%", "1000 %", -0.1, 1.01, 2.0, float("nan"), float("inf")])
def test_a_share_is_between_nothing_and_all(written: object) -> None:
    with pytest.raises(InputError, match="budget: a share lies between 0% and 100%"):
        Budget.parse(written)


@pytest.mark.parametrize("written", ["-1", -1, "-13000"])
def test_a_number_of_token_layers_is_not_negative(written: object) -> None:
    with pytest.raises(InputError, match=r"budget: a number of token-layers is at least 0 \(got -"):
        Budget.parse(written)


def test_one_of_the_two_and_not_both() -> None:
    for given_both in ({}, {"share": 0.5, "token_layers": 3}):
        with pytest.raises(InputError, match="budget: give a share or a number of token-layers"):
            Budget(**given_both)  # type: ignore[arg-type]


@given(st.integers(0, 10_000), st.integers(0, 131_072), st.integers(1, 80))
def test_a_share_is_rounded_down_from_what_was_written(hundredths: int, tokens: int, layers: int) -> None:
    """Exact arithmetic on the written number: floats just short of a whole number do not lose it."""
    written = f"{hundredths // 100}.{hundredths % 100:02}%"
    assert Budget.parse(written).allows(tokens, layers) == Fraction(hundredths, 10_000) * tokens * layers // 1


def test_the_running_example() -> None:
    assert Budget.parse("5%").allows(8192, 32) == 13_107
    assert Budget.parse("7%").allows(100, 1) == 7
    assert Budget.parse("100%").allows(8192, 32) == 8192 * 32
    assert Budget.parse("0%").allows(8192, 32) == 0
    assert Budget.parse("1%").allows(0, 32) == 0


def test_an_absolute_number_is_allowed_as_it_is() -> None:
    assert Budget.parse("13000").allows(10, 3) == 13_000, "it may pay for a probe and for every row"


@pytest.mark.parametrize("written", ["5%", "2.5%", "0%", "100%", "13000", "33.33%"])
def test_it_is_printed_as_it_is_written(written: str) -> None:
    assert str(Budget.parse(written)) == written
    assert Budget.parse(str(Budget.parse(written))) == Budget.parse(written)
