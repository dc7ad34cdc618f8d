"""What was timed of a run's arms on one of its prompts, as it lies in the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvquilt.errors import IntegrityError
from kvquilt.evaluation.run.arms import FULL
from kvquilt.evaluation.run.folder import bytes_of
from kvquilt.evaluation.run.timing import Timing
from kvquilt.files import write_atomically, writing

NAME = "timing.json"
_ABOUT = {"machine", "device", "dtype", "threads", "load"}


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """One prompt of a run.

    Attributes:
        item: whose; `tokens` of full prefill's prompt.
        arms: by name, those of the run that could run on it, and ``prefix-hit``.
        compile: by method, no control, seconds in which all documents of the prompt are compiled.
        about: the machine, what else it did, how often was warmed up.
    """

    item: str
    tokens: int
    arms: dict[str, Timing] = field(repr=False)
    compile: dict[str, float] = field(repr=False)
    about: dict[str, Any] = field(repr=False)


def read_timing(folder: Path) -> tuple[TimedPrompt, ...]:
    """What was timed of the run in a folder; nothing where nothing was.

    Raises:
        IntegrityError: it is damaged: a clock that went backwards included.
        StoreUnavailableError: it cannot be read.
    """
    path = folder / NAME
    if (raw := bytes_of(path)) is None:
        return ()
    try:
        return tuple(_prompt(each) for each in json.loads(raw)["prompts"])
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise IntegrityError(f"{path}: not the times of a run") from error


def write_timing(folder: Path, prompts: Sequence[TimedPrompt]) -> None:
    """Raises `StoreUnavailableError`: it cannot be written."""
    path = folder / NAME
    with writing(path):
        write_atomically(path, (json.dumps({"prompts": [asdict(each) for each in prompts]}, indent=1) + "\n").encode())


def _prompt(stored: Mapping[str, Any]) -> TimedPrompt:
    arms = {
        name: Timing(tuple(map(float, each["wall"])), tuple(map(float, each["processor"])))
        for name, each in stored["arms"].items()
    }
    rounds = len(arms[FULL].wall)
    if rounds < 2 or any(len(each) != rounds for timing in arms.values() for each in (timing.wall, timing.processor)):
        raise ValueError("arms")
    compiling = {name: float(seconds) for name, seconds in stored["compile"].items()}
    times = [seconds for timing in arms.values() for seconds in (*timing.wall, *timing.processor)]
    if not all(0 <= seconds < math.inf for seconds in (*times, *compiling.values())):
        raise ValueError("times")
    about = dict(stored["about"])
    if not about.keys() >= _ABOUT or len(about["load"]) != 2 or isinstance(about["load"], str):
        raise ValueError("about")
    return TimedPrompt(str(stored["item"]), int(stored["tokens"]), arms, compiling, about)
