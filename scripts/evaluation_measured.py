"""What benchmarks/results/eval says: runs of `kvquilt eval`, as sections of docs/results.md and a table of README.md.

``TASK-MODEL.json`` is the ``report.json`` that `kvquilt report` writes, ``TASK-MODEL.md`` its ``report.md``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from methods_measured import RESULTS, table

from kvquilt.evaluation.figures.damage import LEAST_BASE
from kvquilt.evaluation.figures.statistics import Interval
from kvquilt.evaluation.figures.table import interval, named, nats, nats_around
from kvquilt.evaluation.figures.tables import verdict
from kvquilt.evaluation.run.arms import FEWER, FULL, WITHOUT, find_arm

Row = dict[str, Any]

_ABOUT = (
    "Runs of `kvquilt eval` ([guide](evaluation.md)). KL: nats per token of full prefill's own answer, the mean and "
    "where 95 % of it lies when groups of items are drawn anew, as for every interval; recovered: of what `none` lost. "
    "First token: in full prefill's own time, median and quartiles of warmed-up rounds in which the arms took turns; "
    "the median of single readings carries no claim. Charged: what was computed again, choosing included, as a "
    "share of what reuse saves. Where full prefill is not clearly better than no documents, scores say "
    "nothing about reuse, and none is shown. `benchmarks/writers32` is what `kvquilt writers rebind` makes of "
    "`benchmarks/writers` for float32."
)
_README = (
    "Score, where full prefill is clearly better than no documents, and KL to full prefill in nats per token of its "
    "own answer. Intervals, damage, cost: [docs/results.md](docs/results.md#evaluation-on-tasks)."
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a file, as `report.json` has it."""

    file: Path
    about: dict[str, Any]
    summary: dict[str, Any] = field(repr=False)

    @property
    def task(self) -> str:
        return str(self.about["task"])

    @property
    def helped(self) -> Interval | None:
        """Full prefill's score less that of no context."""
        found = self.summary["documents_help"]
        return None if found is None else Interval(**found)

    @property
    def scores(self) -> bool:
        """Whether they say anything about reuse."""
        return self.helped is not None and self.helped.low > 0

    @property
    def measured(self) -> bool:
        """Whether times to the first token were, and are no single readings."""
        return self.summary["prefix_hit"] is not None

    @property
    def arms(self) -> dict[str, Row]:
        return {arm["method"]: arm for arm in self.summary["arms"]}


def evaluation_sections(folder: Path = RESULTS) -> list[str]:
    """A section with every task, a table for every model; nothing where there is no run."""
    runs = runs_of(folder)
    if not runs:
        return []
    lines = ["", "## Evaluation on tasks", "", _ABOUT]
    for task in dict.fromkeys(run.task for run in runs):
        lines += ["", f"### `{task}`"]
        for run in (run for run in runs if run.task == task):
            lines += ["", *_told(run)]
    return lines


def readme_table(folder: Path = RESULTS) -> list[str]:
    """Tasks across, arms down: what a user chooses from, and no controls; nothing where there is no run."""
    runs = runs_of(folder)
    if not runs:
        return []
    arms = [name for name in dict.fromkeys(name for run in runs for name in run.arms) if _chosen(name)]
    heads = [
        f"`{each}` ({r.about['score']}, n = {r.summary['items']})" for r, each in zip(runs, _names(runs), strict=True)
    ]
    rows = [[_arm(name), *(_brief(run, run.arms.get(name)) for run in runs)] for name in arms]
    models = dict.fromkeys(f"{run.about['model']} in {run.about['dtype']}" for run in runs)
    return ["## Measured on tasks", "", f"{', '.join(models)}. {_README}", "", *table(["arm", *heads], rows)]


def _names(runs: list[Run]) -> list[str]:
    """Of tasks, as short as tells them apart: with the model, and with the options, only where it takes them."""
    forms = [
        [run.task.partition(":")[0] for run in runs],
        [run.task for run in runs],
        [f"{run.task}, {run.about['model']}, {run.about['dtype']}" for run in runs],
    ]
    return [next((form[n] for form in forms if form.count(form[n]) == 1), forms[-1][n]) for n in range(len(runs))]


def runs_of(folder: Path = RESULTS) -> list[Run]:
    """Of all files."""
    read = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted((folder / "eval").glob("*.json"))]
    return [Run(path, run["about"], run) for path, runs in read for run in runs]


def _told(run: Run) -> list[str]:
    about, arms = run.about, run.summary["arms"]
    said = verdict(run.helped)
    head = ["arm", "n", "KL to full", "KL recovered"]
    head += [str(about["score"]), "damage"] if run.scores else []
    rows = [
        [_arm(arm["method"]), _count(arm), _kl(arm), _share(arm["fidelity"], "kl_recovery")]
        + ([_score(arm), _damage(arm)] if run.scores else [])
        + [_first(run, arm), _share(arm["work"], "charged")]
        for arm in arms
    ]
    lines = [f"{about['model']}: {said[0].lower()}{said[1:]}", "", _origin(run), ""]
    lines += table([*head, "first token" if run.measured else "first token, single readings", "charged"], rows)
    bases = {arm["scored"]["damage"]["base"] for arm in arms if (arm["scored"] or {}).get("damage")}
    if run.scores and bases:
        few = "" if min(bases) >= LEAST_BASE else f" Fewer than {LEAST_BASE} carry no claim."
        lines += ["", f"Damage: of the {max(bases)} items that full prefill gets right and no context wrong.{few}"]
    lines += [f"\nNot measured: `{name}`: {reason}." for name, reason in run.summary["refused"].items()]
    return lines


def _origin(run: Run) -> str:
    about, items, groups = run.about, run.summary["items"], run.summary["groups"]
    facts = (
        f"{items} items" + ("" if groups == items else f" in {groups} groups"), f"split `{about['split']}`",
        f"seed {about['seed']}", about["dtype"], f"{about['threads']} thread{'s' * (about['threads'] != 1)}",
        about["machine"], f"torch {about['torch']}", f"commit {about['commit']}",
    )  # fmt: skip
    more = f"../benchmarks/results/eval/{run.file.with_suffix('.md').name}"
    return f"{', '.join(facts)}. `{about['command']}` [All figures]({more})."


def _chosen(name: str) -> bool:
    if name.partition(":")[0] == "random":
        return False
    return name in (FULL, WITHOUT) or name.partition(":")[0] == FEWER or find_arm(name).is_method


def _arm(name: str) -> str:
    return f"`{name}`{named(name).removeprefix(name)}"


def _count(arm: Row) -> str:
    return f"{arm['items']} ({arm['refused']} refused)" if arm["refused"] else str(arm["items"])


def _kl(arm: Row) -> str:
    return "-" if arm["fidelity"] is None else nats_around(Interval(**arm["fidelity"]["kl"]))


def _score(arm: Row) -> str:
    return "-" if arm["scored"] is None else interval(Interval(**arm["scored"]["score"]))


def _damage(arm: Row) -> str:
    found = (arm["scored"] or {}).get("damage")
    if found is None or found["damage"] is None:
        return "-"
    around = (arm["scored"]["shares"] or {}).get("damage")
    return f"{found['damage']:.1%}" + ("" if around is None else f" [{around['low']:.1%}, {around['high']:.1%}]")


def _share(of: Row | None, name: str) -> str:
    return "-" if of is None or of[name] is None else f"{of[name]:.1%}"


def _first(run: Run, arm: Row) -> str:
    """One sort of figure for all arms of a run, as its own tables have it."""
    if arm["work"] is None or (run.measured and arm["work"]["timed"] is None):
        return "-"
    if not run.measured:
        return f"{arm['work']['first_token']:.2f}"
    timed = arm["work"]["timed"]
    return f"{timed['ratio']:.3f} [{timed['low']:.3f}, {timed['high']:.3f}]"


def _brief(run: Run, arm: Row | None) -> str:
    if arm is None:
        return "-"
    score = f"{arm['scored']['score']['value']:.3f}" if run.scores and arm["scored"] is not None else ""
    distance = "" if arm["fidelity"] is None else f"KL {nats(arm['fidelity']['kl']['value'])}"
    return ", ".join(filter(None, (score, distance))) or "-"
