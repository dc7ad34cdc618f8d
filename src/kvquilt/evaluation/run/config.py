"""What a run measures: everything that its lines depend on beside model and items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvquilt.errors import InputError
from kvquilt.evaluation.run.arms import find_arm, find_arms
from kvquilt.evaluation.tasks.checks import check_count
from kvquilt.evaluation.tasks.grading import Metric


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings of a run.

    Attributes:
        methods: arms as `find_arm` takes them; `full` and `no-context` are always there, and first.
        metric: what grades an answer right or wrong.
        new_tokens: of an answer at most.
        self_tokens: of full prefill's own answer, as many rows as are compared at most.
        silent: arms of which fidelity alone is measured: they give no answer, which is what takes time.

    Raises:
        InputError: an unknown arm, a silent one that is not there or is full prefill, a count below 1.
    """

    methods: tuple[str, ...]
    metric: Metric
    new_tokens: int = 32
    self_tokens: int = 32
    silent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("new_tokens", "self_tokens"):
            check_count(name, getattr(self, name), 1)
        names = {arm.name for arm in find_arms(self.methods)}
        for name in self.silent:
            if name not in names:
                raise InputError("silent", "must be among the methods of the run", find_arm(name).name)
            if name == "full":
                raise InputError("silent", "full prefill's answer is what the others are compared along", name)

    def as_dict(self) -> dict[str, Any]:
        """As it comes back from JSON."""
        return {**asdict(self), "methods": list(self.methods), "silent": list(self.silent)}


def differences(mine: Mapping[str, Any], stored: Mapping[str, Any], within: str = "") -> list[str]:
    """Full names of what differs, such as ``config.metric.grader``."""
    out: list[str] = []
    for name in dict.fromkeys((*mine, *stored)):
        here, there = mine.get(name), stored.get(name)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            out += differences(here, there, f"{within}{name}.")
        elif name not in mine or name not in stored or here != there:
            out.append(within + name)
    return out
