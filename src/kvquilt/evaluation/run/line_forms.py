"""What the files of a run's folder must say, so that whoever tells of it need not doubt every field.

Files are written whole, but people edit them, disks lose blocks, and other versions write other fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from kvquilt.errors import IntegrityError
from kvquilt.evaluation.run.forms import Form, check_form
from kvquilt.evaluation.run.ledger_form import LedgerForm


class _Own(Form):
    kl: list[float] = Field(min_length=1)
    agree: list[float] = Field(min_length=1)


class _Gold(Form):
    nll: list[float] = Field(min_length=1)


class _GoldOfAnArm(_Gold, _Own):
    pass


class _FullsFidelity(Form):
    gold: _Gold


class _Fidelity(Form):
    own: _Own = Field(alias="self")
    gold: _GoldOfAnArm


class _Scores(Form):
    micro_f1_bag: list[Annotated[int, Field(ge=0)]] = Field(min_length=3, max_length=3)
    marked: bool | None = None


class _Seconds(Form):
    first_token: float = Field(ge=0)


class _Prompt(Form):
    tokens: int = Field(ge=1)


class _Named(Form):
    item: str
    group: str
    method: str
    refused: str | None


class _Read(_Named):
    answer: str | None
    score: float | None
    right: bool | None
    scores: _Scores | None
    ledger: LedgerForm
    prompt: _Prompt
    seconds: _Seconds
    fidelity: _Fidelity

    @model_validator(mode="after")
    def _answers_whole(self) -> Self:
        if len({each is None for each in (self.answer, self.score, self.right, self.scores)}) > 1:
            raise ValueError("an arm answers, or is silent")
        return self


class _ReadByFull(_Read):
    answer: str
    score: float
    right: bool
    scores: _Scores
    fidelity: _FullsFidelity  # type: ignore[assignment]  # held against itself it has no distances


class _Refused(_Named):
    answer: None = None
    score: None = None
    right: None = None
    ledger: None = None


class _Item(Form):
    item: str
    group: str
    task: str
    documents: list[str] = Field(min_length=1)
    gold: list[int]
    answers: list[str]
    ranking: list[int]
    kind: str = ""


class _Text(Form):
    id: str
    text: str


class _Texts(Form):
    item: str
    question: str
    documents: list[_Text]


class _Metric(Form):
    grader: str


class _Config(Form):
    methods: list[str]
    metric: _Metric


class _Settings(Form):
    config: _Config


class _Check(Form):
    name: str
    passed: bool
    value: float = Field(allow_inf_nan=True)  # a control that failed may be anything
    limit: float


class _Begun(Form):
    run: dict[str, Any]
    about: dict[str, Any]
    controls: dict[str, list[_Check]]


def check_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Raises `IntegrityError`: names the first line that is none of a run, and the field."""
    seen = set()
    for number, line in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        if line.get("refused") is not None:
            form: type[Form] = _Refused
        else:
            form = _ReadByFull if line.get("method") == "full" else _Read
        check_form(form, line, where)
        if (named := (line["item"], line["method"])) in seen:
            raise IntegrityError(f"{where} is damaged: item and method had a line before")
        seen.add(named)


def check_begun(path: Path, stored: Mapping[str, Any]) -> None:
    """The same of ``run.json``, whatever it is a run of."""
    check_form(_Begun, stored, str(path))


def check_settings(path: Path, run: Mapping[str, Any]) -> None:
    """The same of what it is a run of, where that is a run of `kvquilt eval`."""
    check_form(_Settings, run, f"{path}: run")


def check_stored_items(path: Path, items: Sequence[Mapping[str, Any]]) -> None:
    """The same of ``items.jsonl``; rankings must be those of their documents."""
    for number, item in enumerate(items, start=1):
        where = f"{path}: line {number}"
        check_form(_Item, item, where)
        count = len(item["documents"])
        if sorted(item["ranking"]) != list(range(count)) or not all(0 <= n < count for n in item["gold"]):
            raise IntegrityError(f"{where} ranks or names documents that it does not have")


def check_texts(path: Path, texts: Sequence[Mapping[str, Any]]) -> None:
    """The same of ``texts.jsonl``."""
    for number, each in enumerate(texts, start=1):
        check_form(_Texts, each, f"{path}: line {number}")
