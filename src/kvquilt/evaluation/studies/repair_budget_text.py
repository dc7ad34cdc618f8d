"""Figures of a study of the repair budget as tables, on a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvquilt.evaluation.figures.damage import LEAST_BASE
from kvquilt.evaluation.figures.table import Table
from kvquilt.evaluation.report.markdown import plain
from kvquilt.evaluation.studies.repair_budget_arms import NONE, called

_NOTHING = "-"
_ARM_HEAD = (
    "arm",
    "items",
    "refused",
    "KL",
    "KL recovered",
    "top-1",
    "right",
    "damage",
    "recovery",
    "collateral",
    "charged",
)


def study_tables(found: Mapping[str, Any]) -> list[Table]:
    """One or more for each part that was measured."""
    made = list(_structure(found))
    made += [_attribution(each) for each in found["attribution"]]
    made += [table for each in found["budget"] for table in _budget(each)]
    made += [table for each in found["context"] for table in _context(each)]
    if found["retrieval"]:
        made.append(_retrieval(found["retrieval"]))
    return made


def markdown(found: Mapping[str, Any]) -> str:
    """All tables, and what is not among them."""
    parts = ["# Repair budget", f"Model: {plain(str(found['about'].get('model')))}."]
    for table in study_tables(found):
        rows = [table.head, tuple("---" for _ in table.head), *table.rows]
        lines = ["| " + " | ".join(c if row is rows[1] else plain(c) for c in row) + " |" for row in rows]
        parts += [f"## {plain(table.title)}", "\n".join(lines), *map(plain, table.notes)]
    return "\n\n".join([*parts, *map(plain, remarks(found))]) + "\n"


def remarks(found: Mapping[str, Any]) -> list[str]:
    """What is not in the tables, and what they cannot say."""
    said = [f"Not finished, so nothing is said of it: {name}." for name in found["unfinished"]]
    for setting, arms in found["refused"].items():
        said += [f"{setting}: {called(arm)} is not measured: {why}" for arm, why in arms.items()]
    for part in ("attribution", "budget", "context"):
        for each in found[part]:
            helped = each["documents_help"]
            if helped is not None and helped["low"] <= 0:
                said.append(
                    f"{part}, {each['of']}: the documents do not clearly help (full prefill {_signed(helped['value'])} "
                    f"above no context, {_signed(helped['low'])} to {_signed(helped['high'])}), so its scores say "
                    "nothing about reuse on this model; KL does."
                )
    return said


def _structure(found: Mapping[str, Any]) -> Iterator[Table]:
    if not found["structure"]:
        return
    rows = []
    for cell in found["structure"]:
        by_arm = {arm["arm"]: arm for arm in cell["arms"]}
        none = by_arm.get(NONE, {})
        place = cell["place"] if cell["distractors"] else _NOTHING
        rows.append(
            (
                cell["of"], cell["structure"], str(cell["distractors"]), place, str(cell["items"]),
                f"{cell['tokens']:.0f}", _share(by_arm["full"].get("right")), _share(by_arm["no-context"].get("right")),
                _number(_kl(none)), _share(none.get("top1")),
                str(none.get("base", _NOTHING)), _share(none.get("damage")),
            )
        )  # fmt: skip
    head = (
        "questions",
        "company",
        "K",
        "target",
        "items",
        "tokens",
        "full right",
        "no-context right",
        "KL",
        "top-1",
        "D",
        "damage",
    )
    notes = (
        "Pure reuse. Company: I0 nothing, I1 of another kind, I2 of the same kind, I3 near-duplicates; K documents of "
        "it, and filler. A target that stands first is exact: only what stands behind it is wrong.",
    )
    yield Table("Structure: damage by what stands beside the target", head, tuple(rows), notes)
    margins = tuple(
        (
            m["of"],
            m["structure"],
            f"{m['by']} {m['value']}",
            str(m["cells"]),
            str(m["base"]),
            _number(m["kl"]),
            _share(m["damage"]),
        )
        for m in found["margins"]
    )
    titles = ("questions", "company", "cells of", "cells", "D", "KL", "damage")
    yield Table("Structure: cells taken together", titles, margins, (_few([m["base"] for m in found["margins"]]),))


def _attribution(each: Mapping[str, Any]) -> Table:
    curve = each["curve"]
    first = curve[0]["kl"] if curve else 0.0
    rows = tuple(
        (
            str(p["given"]),
            str(p["draws"]),
            _number(p["kl"]),
            _share(1 - p["kl"] / first if first > 0 else None),
            _share(p["damage"]),
        )
        for p in curve
    )
    notes = (
        "Other documents that have full prefill's keys and values, one more at a time, in an order that is drawn; the "
        f"target has not. {each['items']} items, |D| = {each['base']}.",
        _few([each["base"] or 0]),
    )
    head = ("given", "draws", "KL", "KL recovered", "damage")
    return Table(f"Attribution: {each['of']}", head, rows, notes)


def _budget(each: Mapping[str, Any]) -> Iterator[Table]:
    chosen = each["chosen"]
    notes = [f"Budget {each['budget']}, probes charged; an arm that cannot pay for its probe is refused on that item."]
    if chosen is None:
        notes.append("Nothing was chosen: the tuning split is not measured.")
    elif chosen["name"] is None:
        notes.append("Nothing was chosen: every token selector failed a control.")
    else:
        tried = ", ".join(f"{name} {_number(kl)}" for name, kl in chosen["kl"].items())
        notes.append(
            f"Token selector chosen on {chosen['items']} items of the tuning split by KL (refused counts as pure "
            f"reuse, {_number(chosen['none'])}): {chosen['name']}. {tried}. The other token selectors are "
            "shown, not claimed."
        )
    yield Table(f"Budget: {each['of']}, {each['items']} items", _ARM_HEAD, _arms(each["arms"]), tuple(notes))
    yield _claims(f"Budget: {each['of']}, the retriever's document moved and computed again", each["claims"])


def _context(each: Mapping[str, Any]) -> Iterator[Table]:
    yield Table(f"Context: {each['of']}, the target's rows, {each['items']} items", _ARM_HEAD, _arms(each["arms"]))
    yield _claims(f"Context: {each['of']}, compared", each["claims"])
    if each["distances"] is None:
        return
    rows = []
    for name, sides in each["distances"].items():
        if sides is not None:
            values = [sides[side][measure] for side in ("keys", "values") for measure in ("l2", "cosine")]
            rows.append((called(name), *(f"{sum(v) / len(v):.4f}" for v in values), *(f"{v[-1]:.4f}" for v in values)))
    measures = ("K L2", "K cosine", "V L2", "V cosine")
    head = ("arm", *measures, *(f"{measure}, last layer" for measure in measures))
    notes = ("Of the target's rows to full prefill's: relative L2 and cosine, means over items and layers.",)
    yield Table(f"Context: {each['of']}, distance of keys and values", head, tuple(rows), notes)


def _retrieval(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for each in rows for name in each["hit@1"]))
    cells = tuple(
        (each["of"], str(each["items"]), _share(each["chance"]), *(_share(each["hit@1"].get(name)) for name in names))
        for each in rows
    )
    notes = ["How often the first is a document that the answer rests on. Attention: the question's, over pure reuse."]
    if not any("dense" in each["hit@1"] for each in rows):
        notes.append("No dense retriever was asked (--dense).")
    return Table("Retrieval: who finds the target", ("task", "items", "chance", *names), cells, tuple(notes))


def _arms(arms: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            called(arm["arm"]), str(arm["items"]), str(arm["refused"] or _NOTHING), _number(_kl(arm)),
            _share(arm.get("kl_recovery")), _share(arm.get("top1")), _share(arm.get("right")),
            _share(arm.get("damage")), _share(arm.get("recovery")), _share(arm.get("collateral")),
            _share(arm.get("charged")),
        )
        for arm in arms
    )  # fmt: skip


def _claims(title: str, claims: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple(
        (
            c["claim"], called(c["arm"]), called(c["against"]), str(c["base"]),
            f"+{c['only_arm']} -{c['only_against']}", _number(c["p"]),
            _NOTHING if c["kl_difference"] is None else _signed(c["kl_difference"]),
            _number(c["kl_p"]),
        )
        for c in claims
    )  # fmt: skip
    notes = (
        "+ questions of D that only the arm gets right, - only the other; exact McNemar test. KL: the arm's less the "
        "other's; signed-rank test. Both p by Holm over the tasks of the study.",
        "KL is to full prefill in the given order, so of an arm that moves documents it holds the order's part too.",
        _few([c["base"] for c in claims]),
    )
    return Table(title, ("claim", "arm", "against", "D", "pairs", "p", "KL difference", "KL p"), rows, notes)


def _few(bases: Sequence[int]) -> str:
    few = any(base < LEAST_BASE for base in bases)
    return f"Fewer than {LEAST_BASE} questions in D carry no claim." if few else "Every D is large enough for a claim."


def _kl(arm: Mapping[str, Any]) -> float | None:
    return arm["kl"]["value"] if "kl" in arm else None


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.3g}"


def _signed(value: float) -> str:
    return f"{value:+.3g}"
