"""Task scores against cases counted by hand."""

from __future__ import annotations

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.metrics import (
    Counts,
    bag_counts,
    bare,
    bare_value,
    contains_em,
    exact_literal,
    f1_recovery,
    is_marked,
    marked,
    micro_f1_bag,
    recall,
    squad_em,
    squad_f1,
)


@pytest.mark.parametrize(
    ("prediction", "value"),
    [
        ("  Amberford.  ", "amberford"),
        ("Ada Hartwood was born in Amberford.", "amberford"),
        ("She was born on 14 March 1971.", "14 march 1971"),
        ("The answer is: Amberford.", "the answer is: amberford"),  # "is:" is not the word "is"
        ("Her employer is Helioworks", "helioworks"),
        ("She works for Helioworks.", "helioworks"),
        ("in Amberford", "in amberford"),  # nothing leads to it
        ("Stanislaw Isgrad", "stanislaw isgrad"),  # no lead inside a word
        ("", ""),
    ],
)
def test_what_is_taken_of_a_biography_prediction(prediction: str, value: str) -> None:
    assert bare_value(prediction) == value


def test_what_is_taken_behind_the_marker() -> None:
    assert marked("First guess. Answer: no. On reflection,\nANSWER: Paul Brackvale.") == "paul brackvale"
    assert marked("Paul Brackvale") == ""
    assert marked("Answer:") == ""
    assert [is_marked(text) for text in ("the Answer: 3", "answer", "Answer:")] == [True, False, True]


@pytest.mark.parametrize(
    ("prediction", "answers", "counts"),
    [
        ("14 March 1971", ["14 March 1971"], Counts(3, 0, 0)),
        ("14 March", ["14 March 1971"], Counts(2, 0, 1)),
        ("on the 14 March 1971", ["14 March 1971"], Counts(3, 2, 0)),
        ("March March", ["March 14 March March"], Counts(2, 0, 2)),
        ("14 14 14", ["14 March"], Counts(1, 2, 1)),
        ("", ["14 March"], Counts(0, 0, 2)),
        ("Amberford", ["14 March"], Counts(0, 1, 2)),
        ("March 14, 1971", ["14 March 1971", "March 14, 1971"], Counts(3, 0, 0)),
        ("nothing", ["first second", "third"], Counts(0, 1, 2)),  # of equals the earliest
        ("MARCH.", ["march"], Counts(1, 0, 0)),
    ],
)
def test_words_of_one_item(prediction: str, answers: list[str], counts: Counts) -> None:
    assert bag_counts(prediction, answers) == counts


def test_the_form_is_of_the_prediction_only() -> None:
    assert bag_counts("He lives in Avengrad", ["Avengrad"], bare_value) == Counts(1, 0, 0)
    assert bag_counts("Lost is Found", ["Lost in Time"], bare) == Counts(1, 2, 2)
    assert bag_counts("no marker here", ["no"], marked) == Counts(0, 0, 1)


def test_corpus_f1_sums_before_it_divides() -> None:
    # P = 3 / 7, R = 3 / 4: F1 = 6 / 11, where the mean over items is (1 + 0.4) / 2
    items = [Counts(2, 0, 0), Counts(1, 4, 1), Counts()]
    assert micro_f1_bag(items) == pytest.approx(6 / 11)
    assert items[1].f1 == pytest.approx(2 / 7)
    assert micro_f1_bag([Counts(0, 5, 5)]) == 0.0
    assert micro_f1_bag([Counts(), Counts()]) == 0.0
    assert micro_f1_bag([Counts(4, 0, 0)]) == 1.0


@pytest.mark.parametrize(
    ("prediction", "answers", "em", "f1"),
    [
        ("The Amber Coast!", ["amber coast"], 1.0, 1.0),
        ("an  amber\ncoast", ["the Amber Coast."], 1.0, 1.0),
        ("amber", ["amber coast"], 0.0, 2 / 3),
        ("theory", ["ory"], 0.0, 0.0),  # an article goes as a word only
        ("coast coast amber", ["coast amber amber"], 0.0, 2 / 3),
        ("amber river", ["coast", "amber sea", "amber"], 0.0, 2 / 3),
        ("", ["amber"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),  # both are empty without articles
        ("it's", ["its"], 1.0, 1.0),
    ],
)
def test_squad_scores(prediction: str, answers: list[str], em: float, f1: float) -> None:
    assert squad_em(prediction, answers) == em
    assert squad_f1(prediction, answers) == pytest.approx(f1)


def test_yes_and_no_have_no_half_marks_in_hotpotqa() -> None:
    assert squad_f1("yes it was", ["yes"]) == pytest.approx(0.5)
    assert squad_f1("yes it was", ["yes"], closed=True) == 0.0
    assert squad_f1("no", ["no way"], closed=True) == 0.0
    assert squad_f1("Yes.", ["yes"], closed=True) == 1.0
    assert squad_f1("amber", ["amber coast"], closed=True) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        ("Helioworks", 1.0),
        ("She works for Helioworks, a firm.", 1.0),
        ("\n\n  helioworks.\nand more", 1.0),
        ("She works for a firm.\nHelioworks", 0.0),
        ("Helioworksystems", 0.0),
        (" ".join(["word"] * 31) + " Helioworks", 1.0),
        (" ".join(["word"] * 32) + " Helioworks", 0.0),
        ("", 0.0),
        ("   \n ", 0.0),
    ],
)
def test_an_answer_that_is_contained(prediction: str, right: float) -> None:
    assert contains_em(prediction, ["Helioworks"]) == right


def test_contained_words_stand_in_a_row_and_any_accepted_form_counts() -> None:
    answers = ["14 March 1971", "March 14, 1971"]
    assert contains_em("It was March 14, 1971.", answers) == 1.0
    assert contains_em("It was on the 14 March of 1971", answers) == 0.0
    assert contains_em("anything", ["the", "!"]) == 0.0  # nothing is left to be found


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        ("FoldError", 1.0),
        ("\n  FoldError.\nand more", 1.0),
        ("`FoldError`.", 1.0),
        ("`FoldError.`", 0.0),
        ("folderror", 0.0),
        ("It raises FoldError", 0.0),
        ("'utf-8'", 1.0),
        ("utf-8", 0.0),
        ("0.", 1.0),  # accepted with its full stop
        ("", 0.0),
        ("`", 0.0),
    ],
)
def test_an_exact_literal(prediction: str, right: float) -> None:
    assert exact_literal(prediction, ["FoldError", "'utf-8'", "0."]) == right


@pytest.mark.parametrize(
    ("prediction", "answers", "share"),
    [
        ("47113 and 90210.", ["47113, 90210"], 1.0),
        ("90210,47113", ["47113, 90210"], 1.0),
        ("The code is 47113\n\nor 4711", ["47113, 90210"], 0.5),
        ("471139", ["47113, 90210"], 0.0),
        ("14 MARCH of 1971 and amber", ["14 March, Amber"], 1.0),
        ("March 14", ["14 March, Amber, Coast"], 0.0),
        ("amber", ["one, two", "Amber, two"], 0.5),
        ("", ["47113"], 0.0),
        ("anything", ["!, anything"], 0.5),  # nothing is left of the first to be found
    ],
)
def test_recall_of_strings(prediction: str, answers: list[str], share: float) -> None:
    assert recall(prediction, answers) == share


def test_recovery() -> None:
    assert f1_recovery(0.7, 0.5, 0.9) == pytest.approx(0.5)
    assert f1_recovery(0.5, 0.5, 0.9) == 0.0
    assert f1_recovery(0.4, 0.5, 0.9) == pytest.approx(-0.25)
    assert f1_recovery(1.0, 0.5, 0.9) == pytest.approx(1.25)
    assert f1_recovery(0.5, 0.0, 0.05) == pytest.approx(10.0)
    assert f1_recovery(0.5, 0.0, 0.04) is None
    assert f1_recovery(0.5, 0.9, 0.2) is None


@pytest.mark.parametrize("score", [bag_counts, squad_em, squad_f1, contains_em, exact_literal, recall])
@pytest.mark.parametrize("answers", [[], "amber"])
def test_a_score_needs_a_list_of_answers(score: object, answers: object) -> None:
    with pytest.raises(InputError, match="answers"):
        score("amber", answers)  # type: ignore[operator]


def test_a_corpus_needs_items() -> None:
    with pytest.raises(InputError, match="counts"):
        micro_f1_bag([])
