"""What a training run leaves: the writer with its best parts, how it was trained and how near it came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvquilt.files import writing
from kvquilt.model.language_model import LanguageModel
from kvquilt.training.config import TrainConfig
from kvquilt.training.resume import Place


@dataclass(frozen=True, eq=False, slots=True)
class Artefact:
    """A writer's folder.

    Attributes:
        prefix: ids that documents are encoded behind.
        plain_start: the run begins with a writer that changes nothing.
    """

    folder: Path
    model: LanguageModel
    config: TrainConfig
    prefix: tuple[int, ...]
    plain_start: bool

    def publish(self, named: Mapping[str, torch.Tensor], place: Place) -> None:
        """Save the writer of these tensors, in place of an earlier one.

        Raises:
            StoreUnavailableError: the folder cannot be written; the earlier one stays.
        """
        model, config = self.model, self.config
        # a writer is passed on: where its model lies on this machine is nobody's business
        name = Path(model.name).name if Path(model.name).exists() else model.name
        writer = config.shape.writer(config.kind, model, named, self.prefix, name)
        before = place.before or {}
        metrics = {"step": place.best_step, "kl": place.best, "none": before.get("none"), "full": before.get("full")}
        with writing(self.folder):
            writer.save(self.folder, recipe=self.config.as_dict(), metrics=metrics)
