"""What the lines of a study of attention must be, as `run_forms` says it of those of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kvquilt.errors import IntegrityError
from kvquilt.evaluation.run.folder import Line
from kvquilt.evaluation.run.forms import Form, check_form
from kvquilt.evaluation.studies.attention_measures import BINS, FIRST, REGIONS

_Number = float | None  # None: there was nothing to take a mean of
_Regions = Annotated[list[_Number], Field(min_length=len(REGIONS), max_length=len(REGIONS))]
_Bins = Annotated[list[_Number], Field(min_length=BINS, max_length=BINS)]
_First = Annotated[list[_Number], Field(min_length=FIRST, max_length=FIRST)]
_BY_HEAD = ("raw", "within", "error", "norm", "cosine", "mass")
_BY_LAYER = (*_BY_HEAD, "by_position", "density", "interior")


class _Named(Form):
    item: str
    group: str
    method: str


class _Refused(_Named):
    refused: str


class _Looked(_Named):
    """`Compared` as JSON."""

    refused: None
    raw: list[Annotated[list[_Regions], Field(min_length=1)]] = Field(min_length=1)
    within: list[list[_Regions]]
    by_position: list[_Bins]
    density: list[_First]
    interior: list[_Number]
    error: list[list[_Number]]
    norm: list[list[_Number]]
    cosine: list[list[_Number]]
    mass: list[list[_Number]]
    seen: float = Field(ge=0, le=1)


def checked(path: Path, lines: Iterable[Line]) -> Iterator[Line]:
    """The same lines one by one: all of them together may be large.

    Raises:
        IntegrityError: names the first line that is none of a study of attention, and the field; one that has not the
            layers and heads of those before, or is of an item and a method that had one.
    """
    shape, seen = None, set()
    for number, line in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        check_form(_Looked if line.get("refused") is None else _Refused, line, where)
        if line["refused"] is None:
            shape = shape or (len(line["raw"]), len(line["raw"][0]))
            _check_shape(line, *shape, where)
        if (named := (line["item"], line["method"])) in seen:
            raise IntegrityError(f"{where} is damaged: item and method had a line before")
        seen.add(named)
        yield line


def _check_shape(line: Line, layers: int, heads: int, where: str) -> None:
    for name in _BY_LAYER:
        if len(line[name]) != layers or (name in _BY_HEAD and any(len(each) != heads for each in line[name])):
            raise IntegrityError(f"{where} is damaged: {name}, which is not of {layers} layers and {heads} heads")
