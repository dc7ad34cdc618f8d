"""docs/methods.md: prose from methods.in.md, settings from the presets, figures from benchmarks/results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from methods_measured import RESULTS, measured, origins, results_of, table, which

from kvquilt.placement import Order
from kvquilt.repair.presets import AUTO_ORDER, METHODS, POST, Method, options_of
from kvquilt.writers.recipes import RECIPES, RESIDUAL

PROSE = Path(__file__).with_name("methods.in.md")
_PICTURE = """\
## The curves

One line per method through its budgets, documents encoded as the preset says; fidelity is exp(-mean KL to full
prefill). Both panels are of the prompts on which answers were measured.

![Fidelity against time to the first token and against charged share](methods.svg)"""


def methods_page(note: str, folder: Path = RESULTS) -> str:
    """The page.

    Raises:
        ValueError: a method, order or recipe without prose, or prose about one that there is not.
    """
    quality, speed = results_of("quality", folder), results_of("speed", folder)
    head, _, sections = PROSE.read_text(encoding="utf-8").partition("\n## The methods\n")
    opening, *texts = re.split(r"^### (.+)\n", sections, flags=re.MULTILINE)
    prose = dict(zip(texts[::2], texts[1::2], strict=True))
    _same("method", prose, METHODS)
    _same("order", _first_cells(head, "orders"), map(str, Order))
    _same("recipe", _first_cells(head, "recipes"), [*RECIPES, f"{RESIDUAL}N"])
    filled = {
        "auto": " and ".join(f"`{name}`" for name in AUTO_ORDER),
        "which": "\n".join(which(quality)),
        "post": "\n".join(_post()),
        "picture": _PICTURE if quality else "",
    }
    lines = [note, "", re.sub(r"{{(\w+)}}", lambda found: filled[found[1]], head), "", "## The methods", ""]
    lines += [opening.strip(), "", *origins(quality, speed)]
    for name, method in METHODS.items():
        lines += ["", f"### {name}", "", prose[name].strip(), "", _settings(method), ""]
        lines += measured(name, quality, speed)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _same(what: str, written: Iterable[str], known: Iterable[str]) -> None:
    if odd := set(written) ^ set(known):
        raise ValueError(f"{PROSE.name}: a {what} without prose, or prose without one: {', '.join(sorted(odd))}")


def _first_cells(head: str, section: str) -> list[str]:
    """Code in the first cells of the table below the heading that ends so."""
    parts = [part for part in head.split("\n## ") if part.split("\n", 1)[0].endswith(section)]
    return re.findall(r"^\| `([^`]+)` \|", "\n".join(parts), re.MULTILINE)


def _settings(method: Method) -> str:
    parts = [
        f"writer `{method.writer}`" if method.writer else "writer of the engine",
        f"order `{method.order}`",
        f"selector {_part(method.selector)}, probe {method.selector.probe}, by {method.selector.granularity}",
        "no budget" if method.budget is None else f"budget {method.budget}",
        "no correction" if method.correction is None else f"correction {_part(method.correction)}",
        *(f"then {_part(each)}" for each in method.post),
    ]
    return f"**Settings.** {'; '.join(parts)}."


def _part(part: Any) -> str:
    return f"`{type(part).__name__}({', '.join(f'{name}={value!r}' for name, value in options_of(part).items())})`"


def _post() -> list[str]:
    rows = []
    for name, made in POST.items():
        kind: Any = type(made(1))
        said = inspect.cleandoc(kind.__doc__)
        number = re.search(r"^Attributes:\n +\w+: (.+?)\.?$", said, re.MULTILINE)
        rows.append([f"`{name}`", number[1] if number else "-", said.split("\n", 1)[0]])
    return table(["option", "its number", "what it makes of the chosen rows"], rows)
