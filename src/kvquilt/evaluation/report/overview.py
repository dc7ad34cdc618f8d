"""What both forms of a report say beside the tables of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvquilt.evaluation.figures.sentences import sentences
from kvquilt.evaluation.figures.table import Table, interval, named
from kvquilt.evaluation.figures.tables import verdict
from kvquilt.evaluation.report.told import Told
from kvquilt.evaluation.run.timed_prompt import TimedPrompt


def overview(runs: Sequence[Told]) -> Table:
    """Scores of all arms in all runs."""
    scores = [{a.method: a.scored for a in run.summary.arms} for run in runs]
    names = dict.fromkeys(name for run in runs for name in run.arms)
    rows = [(named(name), *(interval(s.score) if (s := each.get(name)) else "-" for each in scores)) for name in names]
    head = ("arm", *(f"{run.title} ({run.score}, n={len(run.items)})" for run in runs))
    return Table("Scores", head, tuple(rows), ("Different scores are not for comparing across columns.",))


def remarks(run: Told) -> list[str]:
    """What a reader must know of a run before its figures, a sentence each."""
    first, of = run.found_first
    said = [verdict(run.summary.documents_help)]
    if of:
        said.append(f"The retriever's best document is one that the answer rests on for {first} of {of} items.")
    return said + sentences(run.summary)


def environment(run: Told) -> Table:
    """Command, machine, settings; the prompts that first tokens were timed on."""
    rows = (*_flat(run.about), *(("config." + name, value) for name, value in _flat(run.config)))
    timed = (_timed(prompt) for prompt in run.timing)
    return Table("Where it comes from", ("what", "value"), (*rows, *timed))


def _timed(prompt: TimedPrompt) -> tuple[str, str]:
    about = prompt.about
    before, after = about["load"]
    return "first tokens timed", (
        f"{prompt.item}, {prompt.tokens} tokens; {about['machine']}; {about['device']}, {about['dtype']}, threads "
        f"{about['threads']}; load {before} before, {after} after"
    )


def _flat(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}.")
        elif isinstance(value, list | tuple):
            yield within + name, "; ".join(map(str, value)) or "-"
        else:
            yield within + name, "-" if value is None or value == "" else str(value)
