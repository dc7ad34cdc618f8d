"""What the verbs share: options, settings, output, progress. Imports nothing heavy."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvquilt.config import Settings, Sources


class ExitCode(IntEnum):
    """What the process ends with."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    MODEL = 3
    STORE = 4
    NO_REUSE = 5
    GATE = 6
    INTERRUPTED = 130


CONFIG, FLAGS, JSON = "kvquilt.config", "kvquilt.flags", "kvquilt.json"


def _note_json(context: typer.Context, value: bool) -> bool:
    context.meta[JSON] = value  # so that an error, too, is answered as JSON
    return value


Json = Annotated[bool, typer.Option("--json", callback=_note_json, is_eager=True, help="Print JSON on stdout.")]
ModelFlag = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Hugging Face id, folder, .gguf file or smollm2.")
]
Dtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="Torch device, such as cpu or cuda:0.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads of torch.")]
MethodFlag = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="auto (what the gate allows) or a name, if need be with options: epic:k=16. See `kvquilt methods`.",
    ),
]
BudgetFlag = Annotated[
    str | None,
    typer.Option(
        metavar="BUDGET", help="What METHOD may spend: a share of what reuse saves, such as 5%, or token-layers."
    ),
]
HelperFlag = Annotated[
    str | None,
    typer.Option("--helper-model", metavar="MODEL", help="A second, small model for methods that ask one."),
]
WriterFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--writer", metavar="[NAME=]PATH", help="Folder of a trained writer, whose method auto tries first; repeatable."
    ),
]
Tenant = Annotated[str | None, typer.Option(metavar="NAME", help="Whose segments; tenants never share.")]


def wants_json(context: typer.Context) -> bool:
    """Whether the verb that runs was given ``--json``."""
    return bool(context.meta.get(JSON))


def settings_of(context: typer.Context, **flags: Any) -> tuple[Settings, Sources]:
    """Settings from every source; `flags` are the verb's own options, None where not given."""
    from kvquilt.config import Settings

    meta = context.meta
    return Settings.resolve(meta.get(CONFIG), {**meta.get(FLAGS, {}), **flags})


def method_names(written: str) -> list[str]:
    """``A,B`` or ``A;B`` as the methods A and B. Commas also join a method's options: what can be one, is one.

    >>> method_names("none,epic:k=16,5%,writer=isolated,cacheblend")
    ['none', 'epic:k=16,5%,writer=isolated', 'cacheblend']
    """
    from kvquilt.repair.written import with_option

    if ";" in written:
        return [name.strip() for name in written.split(";") if name.strip()]
    names: list[str] = []
    for part in filter(None, (part.strip() for part in written.split(","))):
        is_option = "=" in part.partition(":")[0] or (part.endswith("%") and ":" not in part) or part.isdigit()
        if is_option and names:
            names[-1] = with_option(names[-1], part)
        else:
            names.append(part)
    return names


def arms_and_writers(written: str, given: Sequence[str]) -> tuple[list[str], list[str]]:
    """`method_names`, where a trained writer may bring its folder, and a repair: their names, and all folders.

    >>> arms_and_writers("none,sempic:./w+retrieved_document:5%", ["joint=./j"])
    (['none', 'retrieved-document:5%,writer=sempic'], ['joint=./j', './w'])
    """
    from kvquilt.repair.written import with_option
    from kvquilt.writers.recipes import KINDS

    names, folders = [], list(given)
    for each in method_names(written):
        left, repair = _repaired(each)
        name, _, folder = left.partition(":")
        kind = name.replace("_", "-")
        if kind not in KINDS or not (repair or _is_folder(folder)):
            names.append(each)
            continue
        if folder and folder not in folders:
            folders.append(folder)
        method, colon, options = repair.partition(":")
        names.append(with_option(method.replace("_", "-") + colon + options, f"writer={kind}") if repair else kind)
    return names, folders


def _repaired(written: str) -> tuple[str, str]:
    """A trained writer and its folder, and the method that repairs, if there is one: a folder's name may have ``+``."""
    from kvquilt.repair.presets import METHODS

    parts = written.split("+")
    cuts = [("+".join(parts[:n]), "+".join(parts[n:])) for n in range(1, len(parts))]
    for left, repair in cuts:
        if repair.partition(":")[0].replace("_", "-") in METHODS:
            return left, repair
    return cuts[0] if cuts and not Path(written.partition(":")[2]).expanduser().is_dir() else (written, "")


def _is_folder(written: str) -> bool:
    """Whether what stands behind a method is no option of it: neither a budget nor ``field=value``."""
    return bool(written) and ("/" in written or not ("=" in written or written[-1] == "%" or written.isdigit()))


def echo_json(data: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(data: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def echo_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns on stdout, as wide as their content; nothing is cut, so that scripts and people read the same.

    Cells are lines of text: control characters, which a file's names may have, do nothing to the terminal.
    """
    from kvquilt.evaluation.report.visible import visible

    table = [tuple(visible(" ".join(cell.split("\n"))) for cell in row) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def width() -> int:
    """Columns for tables with borders: the terminal's, within reason; 110 where there is none."""
    return min(110, max(60, shutil.get_terminal_size((110, 0)).columns))


def warn(message: str) -> None:
    """A remark on stderr."""
    typer.echo(f"kvquilt: {message}", err=True)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, as a callable of (done, total); None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size(count: float) -> str:
    """Bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
