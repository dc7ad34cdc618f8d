"""The items of a run as HTML: question, documents by what became of them, every arm's answer side by side.

Everything that a person or a model wrote is escaped by `shown`, and nothing else escapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from kvquilt.evaluation.report.told import Told
from kvquilt.evaluation.report.visible import visible
from kvquilt.evaluation.run.folder import Line
from kvquilt.ledger import Spending

_SAID = {True: ("right", "✓"), False: ("wrong", "✗"), None: ("silent", "·")}


def shown(text: object) -> str:
    """Text as the page may hold it: no markup, no control characters, its direction its own affair."""
    return escape(visible(str(text)))


def browser(run: Told, most: int, name: str) -> str:
    """The first `most` items of the run, folded; ids begin with `name`."""
    items = run.items[:most]
    if not items:
        return ""
    parts = [f'<h3 id="{name}-items">Items</h3>']
    if len(items) < len(run.items):
        parts.append(f"<p>The first {len(items)} of {len(run.items)}.</p>")
    if not run.texts:
        parts.append("<p>The folder came without questions and documents: their names alone are shown.</p>")
    parts.append(_controls(run, name))
    parts += [_item(run, item, f"{name}-item-{n}") for n, item in enumerate(items)]
    return "".join(parts)


def _controls(run: Told, name: str) -> str:
    """Which items are shown, and whose view of the documents; both need the page's script."""
    numbered = list(enumerate(run.arms))
    colour = "".join(f'<option value="{n}">{shown(arm)}</option>' for n, arm in numbered)
    lost = "".join(
        f'<option value="{what}:{n}">{shown(text.format(arm))}</option>'
        for n, arm in numbered
        if arm != "full"
        for what, text in (("lost", "right in full, wrong in {}"), ("gained", "wrong in full, right in {}"))
    )
    return (
        f'<p class="controls" hidden><label>Show <select class="only"><option value="">all items</option>{lost}'
        f'</select></label> <label>Colour documents by <select class="colour">{colour}</select></label> '
        f'<span class="count" role="status"></span> Keys: j next, k previous item.</p>'
    )


def _item(run: Told, item: Line, name: str) -> str:
    lines, texts = run.lines[item["item"]], run.texts.get(item["item"], {})
    right = ",".join(str(n) for n, arm in enumerate(run.arms) if lines[arm]["right"])
    marks = "".join(_mark(lines[arm], f"{n + 1}") for n, arm in enumerate(run.arms))
    question = shown(texts.get("question", ""))
    return (
        f'<details class="item" id="{name}" data-right="{right}"><summary><bdi class="id">{shown(item["item"])}</bdi> '
        f'<bdi class="question">{question}</bdi> <span class="marks">{marks}</span></summary>'
        f"<p>Accepted: {'; '.join(f'<bdi>{shown(answer)}</bdi>' for answer in item['answers'])}</p>"
        f"{_answers(run, lines)}{_documents(run, item, lines, texts)}</details>"
    )


def _mark(line: Line, number: str) -> str:
    said, sign = _SAID[line["right"]]
    return f'<span class="{said}" title="{shown(line["method"])}: {said}">{number}{sign}</span>'


def _answers(run: Told, lines: Mapping[str, Line]) -> str:
    rows = "".join(_answer(n, lines[arm]) for n, arm in enumerate(run.arms))
    head = "".join(f'<th scope="col">{each}</th>' for each in ("#", "arm", "", run.score, "answer", "KL", "charged"))
    return (
        f'<div class="scroll"><table class="answers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _answer(n: int, line: Line) -> str:
    said, sign = _SAID[line["right"]]
    if line["refused"] is not None:
        cells = f'<td></td><td></td><td colspan="3">refused: {shown(line["refused"])}</td>'
    else:
        rows = line["fidelity"].get("self", {}).get("kl", [])
        spent = line["ledger"]["spending"]
        charged = "" if spent is None else f"{Spending(**spent).charged_share:.1%}"
        answer = "<i>not asked</i>" if line["answer"] is None else f'<bdi class="said">{shown(line["answer"])}</bdi>'
        score = "" if line["score"] is None else f"{line['score']:.2f}"
        kl = f"{sum(rows) / len(rows):.3f}" if rows else ""
        cells = f'<td class="{said}">{sign} {said}</td><td>{score}</td><td>{answer}</td><td>{kl}</td><td>{charged}</td>'
    return f'<tr><td>{n + 1}</td><th scope="row">{shown(line["method"])}</th>{cells}</tr>'


def _documents(run: Told, item: Line, lines: Mapping[str, Line], texts: Line) -> str:
    written = {each["id"]: each["text"] for each in texts.get("documents", ())}
    uses = [_uses(lines[arm]) for arm in run.arms]
    head = "".join(f'<th scope="col" title="{shown(arm)}">{n + 1}</th>' for n, arm in enumerate(run.arms))
    rows, bodies = [], []
    for n, document in enumerate(item["documents"]):
        gold = ' <b class="gold">gold</b>' if n in item["gold"] else ""
        rank = item["ranking"].index(n) + 1
        became = [use.get(document, ("", "")) for use in uses]
        cells = "".join(f'<td class="p-{kind or "none"}">{shown(text) or "-"}</td>' for kind, text in became)
        rows.append(f'<tr><th scope="row"><bdi>{shown(document)}</bdi>{gold}</th><td>{rank}</td>{cells}</tr>')
        if document in written:
            kinds = ",".join(kind for kind, _ in became)
            bodies.append(
                f'<details class="document" data-kinds="{kinds}"{" open" if gold else ""}><summary>'
                f'<bdi>{shown(document)}</bdi>{gold}</summary><div class="text" dir="auto">{shown(written[document])}'
                "</div></details>"
            )
    return (
        '<div class="scroll"><table class="became"><caption>What became of each document, by arm</caption><thead><tr>'
        f'<th scope="col">document</th><th scope="col">rank</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        f"</table></div>{''.join(bodies)}"
    )


def _uses(line: Line) -> dict[str, tuple[str, str]]:
    """By document: a provenance, and what is said of it."""
    return {} if line["ledger"] is None else dict(_each_use(line["ledger"]))


def _each_use(ledger: Line) -> Iterator[tuple[str, tuple[str, str]]]:
    for use in ledger["documents"]:
        kind, some = str(use["provenance"]), use["recomputed"]
        part = f" + {some} of {use['tokens']} recomputed" if some and kind != "recomputed" else ""
        yield str(use["id"]), (kind, kind + part)
