"""Where a training run stands, in one file: parameters, optimizer, place; no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvquilt.errors import IntegrityError
from kvquilt.files import write_atomically


def save_state(
    path: Path,
    parameters: dict[str, torch.nn.Parameter],
    best: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    place: dict[str, Any],
) -> None:
    """Write everything that the next step depends on; readers see the old file or the whole new one.

    Args:
        best: the parameters with the lowest validation loss so far.
        place: JSON: the step, the schedule's last, the configuration.
    """
    tensors = {f"parameter.{name}": p.detach() for name, p in parameters.items()}
    tensors |= {f"best.{name}": p for name, p in best.items()}
    for name, p in parameters.items():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
    made = {name: t.contiguous().cpu().clone() for name, t in tensors.items()}
    write_atomically(path, save(made, {"place": json.dumps(place)}))


def load_state(
    path: Path, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Put everything back; the place and the best parameters.

    Raises:
        IntegrityError: the file is damaged, or of other parameters.
    """
    try:
        with safe_open(str(path), "pt") as file:
            place: dict[str, Any] = json.loads((file.metadata() or {})["place"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(tensors[f"parameter.{name}"])
                keys = [k.split(".")[1] for k in tensors if k.startswith("optimizer.") and k.split(".", 2)[2] == name]
                if keys:
                    optimizer.state[p] = {key: tensors[f"optimizer.{key}.{name}"].to(_home(key, p)) for key in keys}
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise IntegrityError(f"{path.name}: not the state of this training run ({type(error).__name__})") from error
    return place, {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}


def _home(key: str, parameter: torch.nn.Parameter) -> torch.device:
    return torch.device("cpu") if key == "step" else parameter.device  # where torch keeps it
