"""What the files of a run's folder must say, so that whoever tells of it need not doubt every field.

Files are written whole, but people edit them, disks lose blocks, and other versions write other fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvquilt.errors import IntegrityError
from kvquilt.ledger import Provenance


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Exactly(_Form):
    """What becomes an object of these fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class _Use(_Exactly):
    id: str
    tokens: int
    start: int
    provenance: str = Field(pattern=f"^({'|'.join(Provenance)})$")
    source: str
    why: str
    recomputed: int


class _Fallback(_Exactly):
    reason: str
    detail: str


class _Spending(_Exactly):
    tokens: int
    layers: int
    allowed: int | None
    rows: int
    probe: int
    repair: int
    first: int = 0
    last: int | None = None


class _Tokens(_Exactly):
    exact: int
    reused: int
    recomputed: int
    corrected: int
    absent: int
    inline: int


class _Ledger(_Exactly):
    method: str
    asked: str
    tokens: _Tokens
    forward_tokens: dict[str, int]
    token_layers: int
    bytes_read: dict[str, int]
    flops: float = Field(gt=0)
    flops_full: float
    fallbacks: list[_Fallback]
    documents: list[_Use]
    spending: _Spending | None
    gate: str
    model: str
    threads: int
    writer: str
    soft_rows: int = 0


class _Own(_Form):
    kl: list[float] = Field(min_length=1)
    agree: list[float] = Field(min_length=1)


class _Gold(_Form):
    nll: list[float] = Field(min_length=1)


class _GoldOfAnArm(_Gold, _Own):
    pass


class _FullsFidelity(_Form):
    gold: _Gold


class _Fidelity(_Form):
    own: _Own = Field(alias="self")
    gold: _GoldOfAnArm


class _Scores(_Form):
    micro_f1_bag: list[int] = Field(min_length=3, max_length=3)
    marked: bool | None = None


class _Seconds(_Form):
    first_token: float = Field(ge=0)


class _Prompt(_Form):
    tokens: int = Field(ge=1)


class _Named(_Form):
    item: str
    group: str
    method: str
    refused: str | None


class _Read(_Named):
    answer: str | None
    score: float | None
    right: bool | None
    scores: _Scores | None
    ledger: _Ledger
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


class _Item(_Form):
    item: str
    group: str
    task: str
    documents: list[str] = Field(min_length=1)
    gold: list[int]
    answers: list[str]
    ranking: list[int]
    kind: str = ""


class _Text(_Form):
    id: str
    text: str


class _Texts(_Form):
    item: str
    question: str
    documents: list[_Text]


class _Metric(_Form):
    grader: str


class _Config(_Form):
    methods: list[str]
    metric: _Metric


class _Settings(_Form):
    config: _Config


class _Check(_Form):
    name: str
    passed: bool
    value: float = Field(allow_inf_nan=True)  # a control that failed may be anything
    limit: float


class _Run(_Form):
    run: _Settings
    about: dict[str, Any]
    controls: dict[str, list[_Check]]


def check_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Raises `IntegrityError`: names the first line that is none of a run, and the field."""
    for number, line in enumerate(lines, start=1):
        if line.get("refused") is not None:
            form: type[_Form] = _Refused
        else:
            form = _ReadByFull if line.get("method") == "full" else _Read
        _check(form, line, f"{path}: line {number}")


def check_run(path: Path, run: Mapping[str, Any]) -> None:
    """The same of ``run.json``."""
    _check(_Run, run, str(path))


def check_stored_items(path: Path, items: Sequence[Mapping[str, Any]]) -> None:
    """The same of ``items.jsonl``; rankings must be those of their documents."""
    for number, item in enumerate(items, start=1):
        where = f"{path}: line {number}"
        _check(_Item, item, where)
        count = len(item["documents"])
        if sorted(item["ranking"]) != list(range(count)) or not all(0 <= n < count for n in item["gold"]):
            raise IntegrityError(f"{where} ranks or names documents that it does not have")


def check_texts(path: Path, texts: Sequence[Mapping[str, Any]]) -> None:
    """The same of ``texts.jsonl``."""
    for number, each in enumerate(texts, start=1):
        _check(_Texts, each, f"{path}: line {number}")


def _check(form: type[_Form], value: Mapping[str, Any], where: str) -> None:
    try:
        form.model_validate(value)
    except ValidationError as error:
        at = ".".join(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
        rule = "is damaged, or of another version"
        raise IntegrityError(f"{where} {rule}: {at or 'all of it'}") from None  # the chained error quotes answers
