"""What the folders of a study of the repair budget must say beside what `run_forms` asks of every run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from kvquilt.errors import IntegrityError
from kvquilt.evaluation.run.folder import Line
from kvquilt.evaluation.run.forms import Exactly, Form, check_form
from kvquilt.evaluation.studies.interference import Place, Structure
from kvquilt.evaluation.studies.repair_budget_settings import ARMS, DISTANCES, HITS, PARTS
from kvquilt.evaluation.studies.target_hits import MASS


class _Study(Form):
    part: str = Field(pattern=f"^({'|'.join(PARTS)})$")
    of: str
    measures: str = Field(pattern=f"^({ARMS}|{DISTANCES}|{HITS})$")


class _Cell(_Study):
    structure: Structure
    distractors: int
    place: Place


class _Attribution(_Study):
    given: dict[str, int]


class _Budget(_Study):
    split: str
    budget: str


class _Tuning(_Study):
    candidates: dict[str, Annotated[list[str], Field(min_length=1)]]


_BY_PART: dict[str, type[Form]] = {"structure": _Cell, "attribution": _Attribution, "budget": _Budget}


class _Named(Form):
    item: str
    group: str


class _Side(Form):
    l2: list[float] = Field(min_length=1)
    cosine: list[float] = Field(min_length=1)


class _Apart(Exactly):
    keys: _Side
    values: _Side


class _Unable(Exactly):
    refused: str


class _Distances(_Named):
    arms: dict[str, _Unable | _Apart] = Field(min_length=1)


class _Hits(_Named):
    gold: list[int]
    scores: dict[str, Annotated[list[float], Field(min_length=1)]]

    @model_validator(mode="after")
    def _of_the_same_documents(self) -> Self:
        documents = {len(each) for each in self.scores.values()}
        if MASS not in self.scores or len(documents) > 1 or not all(0 <= n < max(documents) for n in self.gold):
            raise ValueError("a score for each document")
        return self


def check_setting(path: Path, study: Any) -> None:
    """Raises `IntegrityError`: ``run.json`` does not say which setting of a study its run is; names the field."""
    where = f"{path}: about.study"
    check_form(_Study, study, where)
    form = _Tuning if study.get("split") == "tuning" else _BY_PART.get(study["part"], _Study)
    check_form(form, study, where)


def check_distances(path: Path, lines: Sequence[Line]) -> None:
    """Raises `IntegrityError`: names the first line that has no distances of keys and values, and the field; one that
    has not the arms of the first, or other layers."""
    layers: set[int] = set()
    for number, line in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        check_form(_Distances, line, where)
        if line["arms"].keys() != lines[0]["arms"].keys():
            raise IntegrityError(f"{where} is damaged: arms, which are not those of the first line")
        sides = [side for arm in line["arms"].values() if "refused" not in arm for side in arm.values()]
        layers |= {len(side[measure]) for side in sides for measure in ("l2", "cosine")}
        if len(layers) > 1:
            raise IntegrityError(f"{where} is damaged: arms, which are not all of as many layers")


def check_hits(path: Path, lines: Sequence[Line]) -> None:
    """Raises `IntegrityError`: names the first line that has not everybody's scores of the documents, and the field."""
    for number, line in enumerate(lines, start=1):
        check_form(_Hits, line, f"{path}: line {number}")
