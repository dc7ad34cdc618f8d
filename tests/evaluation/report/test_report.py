"""Reports of a hand-made folder: figures, escaping, and a page that stands alone."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.report.markdown import plain
from kvquilt.evaluation.report.plot import Point, scatter
from kvquilt.evaluation.report.told import read_told
from kvquilt.evaluation.report.writing import write
from kvquilt.ledger import DocumentUse, Ledger, Provenance, Spending

HOSTILE = "</div></details><script>document.title='taken'</script><img src=x onerror=alert(1)>\x1b[31m & \u202eevil"
ARMS = ("full", "no-context", "none", "epic:k=2", "fewer-documents:1", "full-again")
VOID = {"meta", "path", "circle", "br", "img", "link", "input"}


def line(arm: str, n: int) -> dict[str, Any]:
    right = arm in ("full", "full-again") or (arm == "epic:k=2" and n != 1)
    kinds = {"none": Provenance.REUSED, "epic:k=2": Provenance.REUSED}
    ledger = Ledger(method=arm, flops=60.0, flops_full=120.0, model="tiny")
    ledger.tokens[Provenance.INLINE] = 10
    ledger.documents = [
        DocumentUse(
            f"d{n}<b>", 40, 0, kinds.get(arm, Provenance.RECOMPUTED), "memory", "why", 2 if "epic" in arm else 0
        )
    ]
    if arm == "epic:k=2":
        ledger.spending = Spending(40, 2, None, 2, 0, 4)
    account = ledger.as_dict()
    del account["seconds"]
    fidelity: dict[str, Any] = {"gold": {"nll": [1.0]}}
    if arm != "full":
        rows = {"kl": [0.0 if arm == "full-again" else 0.5], "agree": [1.0]}
        fidelity = {"self": rows, "gold": {**rows, "nll": [1.25]}}
    return {
        "item": f"item-{n}", "group": f"group-{n}", "method": arm, "refused": None, "answer": f"answer {HOSTILE}",
        "score": float(right), "right": right, "scores": {"micro_f1_bag": [int(right), 1, 1]},
        "fidelity": fidelity, "ledger": account, "prompt": {"tokens": 50},
        "seconds": {"first_token": 1.0 if "full" in arm else 0.25},
    }  # fmt: skip


def folder(path: Path, items: int = 3, texts: bool = True, lines: int | None = None) -> Path:
    path.mkdir()
    config = {"methods": list(ARMS[2:]), "metric": {"grader": "contains_em"}, "silent": []}
    about = {"task": "jsonl:<i>own</i>", "model": "tiny|model", "command": "kvquilt eval --task '<x>'", "writers": []}
    (path / "run.json").write_text(json.dumps({"run": {"config": config}, "about": about, "controls": {}}))
    described = [
        {"item": f"item-{n}", "group": f"group-{n}", "task": "jsonl", "documents": [f"d{n}<b>", "other"], "gold": [0],
         "answers": [f"yes {HOSTILE}"], "ranking": [0, 1] if n else [1, 0]}
        for n in range(items)
    ]  # fmt: skip
    (path / "items.jsonl").write_text("".join(json.dumps(each) + "\n" for each in described))
    if texts:
        written = [
            {"item": f"item-{n}", "question": f"Why {HOSTILE}?", "documents": [{"id": f"d{n}<b>", "text": HOSTILE * 3}]}
            for n in range(items)
        ]
        (path / "texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in written))
    made = [json.dumps(line(arm, n)) + "\n" for n in range(items) for arm in ARMS]
    (path / "lines.jsonl").write_text("".join(made[:lines]))
    return path


class Page(HTMLParser):
    """Tags in their nesting, what they refer to, and text outside of script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def report(*folders: Path, most: int = 200) -> tuple[str, str, Any]:
    html, markdown, figures = write(folders, folders[0], most)
    return html.read_text(), markdown.read_text(), json.loads(figures.read_text())


def test_a_page_is_whole_and_asks_for_nothing(tmp_path: Path) -> None:
    html, _, _ = report(folder(tmp_path / "run"))
    page = Page(html)
    assert page.open == []
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in page.tags}
    assert [a for _, attributes in page.tags for a in attributes if a.startswith("on") or a == "src"] == []
    assert [a["href"] for a in page.of("a")] == ["#run-0"]
    assert len(page.of("script")) == 1
    assert not re.search(r"url\(|@import|https?:", html)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    policy = page.of("meta")[1]["content"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'sha256-" in policy


def test_whatever_people_and_models_write_stays_text(tmp_path: Path) -> None:
    html, _, _ = report(folder(tmp_path / "run"))
    page = Page(html)
    assert "<script>document" not in html
    assert "\x1b" not in html
    shown = HOSTILE.replace("\x1b", "\ufffd")
    assert f"Why {shown}?" in page.text
    assert f"answer {shown}" in page.text
    assert shown * 3 in page.text
    assert "jsonl:<i>own</i> on tiny|model" in page.text


def test_items_can_be_browsed_by_what_became_of_them(tmp_path: Path) -> None:
    html, _, _ = report(folder(tmp_path / "run"), most=2)
    page = Page(html)
    items = [a for a in page.of("details") if a["class"] == "item"]
    assert [item["data-right"] for item in items] == ["0,3,5", "0,5"]
    assert "The first 2 of 3." in page.text
    kinds = [a["data-kinds"] for a in page.of("details") if a["class"] == "document"]
    assert kinds[0] == "recomputed,recomputed,reused,reused,recomputed,recomputed"
    assert "reused + 2 of 40 recomputed" in page.text
    assert "right in full, wrong in epic:k=2" in page.text


def test_figures_are_in_both_forms_and_texts_in_the_page_alone(tmp_path: Path) -> None:
    html, markdown, figures = report(folder(tmp_path / "run"))
    for text in (Page(html).text, markdown.replace("\\", "")):
        assert "0.667 [0.000, 1.000]" in text
        assert "full-again (noise floor)" in text
        assert "Fewer than 30 questions in D carry no claim." in text
        assert "one that the answer rests on for 2 of 3 items" in text
    assert html.count("<svg") == 4
    assert "evil" not in markdown
    assert "evil" not in json.dumps(figures)
    assert [arm["method"] for arm in figures[0]["arms"]] == list(ARMS)
    assert "| epic:k=2 | 3 |" in markdown
    rows = [row for row in markdown.splitlines() if row.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows if "config" in row}) == 1


def test_several_runs_have_an_overview(tmp_path: Path) -> None:
    html, markdown, figures = report(folder(tmp_path / "a"), folder(tmp_path / "b", items=2))
    assert len(figures) == 2
    assert "### Scores" in markdown
    page = Page(html)
    assert [a["href"] for a in page.of("a")] == ["#run-0", "#run-0", "#run-1"]
    assert "contains_em, n=2" in page.text


def test_a_run_that_goes_on_is_told_as_far_as_it_is(tmp_path: Path) -> None:
    told = read_told(folder(tmp_path / "some", texts=False, lines=len(ARMS) * 2 + 1))
    assert told.extent == "2 items; the run is not finished, it has 3"
    html, _, _ = report(tmp_path / "some")
    assert "The folder came without questions and documents" in html
    with pytest.raises(InputError, match="no item that is finished"):
        read_told(folder(tmp_path / "none", lines=3))
    with pytest.raises(InputError, match="holds no run"):
        read_told(tmp_path)


def test_markdown_means_nothing_in_a_line() -> None:
    assert plain("a|b\n<i>_x_</i> [l](u) `c`") == r"a\|b \<i\>\_x\_\</i\> \[l\](u) \`c\`"
    assert plain("a\x1b[31m\r\nb\ud800") == "a\ufffd\\[31m b\ufffd"


def test_points_stand_where_their_values_are() -> None:
    low, top = Point("1", "low", 0.0, 0.001, 0.0, 0.01, "method"), Point("2", "top", 1.0, 1.0, 1.0, 1.0, "method")
    drawn = scatter([low, top], "x", "y", logarithmic=True)
    assert ">0.1<" in drawn
    assert ">1<" in drawn
    first, second = ((float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn))
    assert first[0] < second[0]
    assert first[1] > second[1]
    assert "drawn at the bottom: 1<" in drawn
    linear = scatter([Point("1", "one", 0.5, 0.5, 0.25, 0.75, "method")], "x", "y")
    assert 'cx="446.0"' in linear, "the largest stands at the right edge"
    assert ">0.5<" in linear


@pytest.mark.parametrize("tiny", [3e-8, 1e-6, 5e-4, 0.0])
def test_what_is_next_to_nothing_does_not_squeeze_the_rest(tiny: float) -> None:
    def at(mark: str, y: float) -> Point:
        return Point(mark, mark, 0.5, y, y / 2, 2 * y, "method")

    some = [at("1", 0.2), at("2", 0.06), at("3", 1.5)]
    alone, beside = (scatter(each, "x", "KL", logarithmic=True) for each in (some, [*some, at("<4>", tiny)]))
    heights = [re.findall(r'cy="([\d.]+)"', drawn) for drawn in (alone, beside)]
    assert heights[1][:3] == heights[0]
    assert float(heights[1][3]) > max(map(float, heights[0]))
    assert "below 0.01, drawn at the bottom: &lt;4&gt;</text>" in beside
    assert "drawn at the bottom" not in alone
    assert all(f">{mark}<" in alone for mark in ("0.01", "0.02", "0.05", "0.1", "0.5", "1", "2"))


def test_equal_and_empty_distances_have_an_axis_too() -> None:
    for y in (0.0, 0.25):
        drawn = scatter([Point("1", "one", 0.0, y, y, y, "method")] * 2, "x", "KL", logarithmic=True)
        assert "nan" not in drawn
        assert "drawn at the bottom" in drawn or y
