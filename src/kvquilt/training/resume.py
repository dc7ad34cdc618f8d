"""Where a training run stands, in one file: parameters, optimizer, place; no pickle.

Nothing else is needed: order, shuffles and rates depend on seed and step, and no step draws a random number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvquilt.errors import IntegrityError, StoreUnavailableError
from kvquilt.files import write_atomically


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run stands, and what it is a run of.

    Attributes:
        run: the configuration and digests of model, exercises and start.
        step: steps that are done.
        due: the report of the last one, as long as it is not validated and logged.
        before: what held-out exercises gave before the first step.
        best: lowest validation KL, after `best_step` steps, 0 being the start; None if nothing is held out.
        asked, empty: questions of the first epoch, and those that the teacher answered with nothing.
    """

    run: dict[str, Any]
    step: int = 0
    seconds: float = 0.0
    due: dict[str, Any] | None = None
    before: dict[str, float] | None = None
    best: float | None = None
    best_step: int = 0
    asked: int = 0
    empty: int = 0


def save_state(
    path: Path,
    parameters: Mapping[str, torch.nn.Parameter],
    best: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    place: Place,
) -> None:
    """Write everything that the next step depends on; readers see the old file or the whole new one.

    Args:
        best: the parameters with the lowest validation KL so far.

    Raises:
        StoreUnavailableError: the file system refuses; the old file stays.
    """
    tensors = {f"parameter.{name}": p.detach() for name, p in parameters.items()}
    tensors |= {f"best.{name}": p for name, p in best.items()}
    for name, p in parameters.items():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
    made = {name: t.contiguous().cpu().clone() for name, t in tensors.items()}
    try:
        write_atomically(path, save(made, {"place": json.dumps(asdict(place))}))
    except OSError as error:
        rule = f"{path} cannot be written: {error.strerror or error}"
        raise StoreUnavailableError(
            f"{rule}. What was saved before stays; the same command goes on from there"
        ) from error


def load_place(path: Path) -> Place:
    """What a state file is of, without its tensors.

    Raises:
        IntegrityError: the file is damaged.
    """
    with _damage(path), safe_open(str(path), "pt") as file:
        written = json.loads((file.metadata() or {})["place"])
        if {*written} != {f.name for f in fields(Place)}:
            raise KeyError("place")
        return Place(**written)


def load_state(
    path: Path, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Put parameters and optimizer back; the best parameters. Nothing is changed where it raises.

    Raises:
        IntegrityError: the file is damaged, or of other parameters.
    """
    with _damage(path):
        with safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        kept = {name.removeprefix("parameter."): t for name, t in tensors.items() if name.startswith("parameter.")}
        if {n: t.shape for n, t in kept.items()} != {n: p.shape for n, p in parameters.items()}:
            raise KeyError("parameters")
        states: dict[str, dict[str, torch.Tensor]] = {}
        for full, tensor in tensors.items():
            if full.startswith("optimizer."):
                _, key, name = full.split(".", 2)
                states.setdefault(name, {})[key] = tensor
        if not states.keys() <= parameters.keys():
            raise KeyError("optimizer")
        for name, state in states.items():
            p = parameters[name]
            optimizer.state[p] = {key: t if key == "step" else t.to(p.device) for key, t in state.items()}
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(kept[name])
    return {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = type(error).__name__
        rule = f"{path}: not the state of a training run ({reason}); delete it to start from the beginning"
        raise IntegrityError(rule) from error
