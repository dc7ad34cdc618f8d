"""The folder of a training run: who may write it, its log, its state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquilt.files import add_line, held, write_atomically, writing


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Files of one run.

    ``log.jsonl`` has a line per step, and one for step 0: what held-out exercises give before it. ``questions.jsonl``,
    ``state.safetensors`` and ``targets/`` are what a stopped run goes on from, of no use to a finished one.
    """

    path: Path

    @property
    def state(self) -> Path:
        return self.path / "state.safetensors"

    @property
    def targets(self) -> Path:
        return self.path / "targets"

    @property
    def questions(self) -> Path:
        return self.path / "questions.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    def held(self) -> AbstractContextManager[None]:
        """Nobody else trains into it meanwhile.

        Raises:
            InputError: somebody does.
            StoreUnavailableError: the folder cannot be written.
        """
        return held(self.path, "out", "trains into")

    def note(self, line: Mapping[str, Any]) -> None:
        """Add a line to the log."""
        add_line(self.log, line)

    def lines(self) -> list[dict[str, Any]]:
        """The log up to the first line that is damaged, as the last may be."""
        found: list[dict[str, Any]] = []
        try:
            written = self.log.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            written = []
        for each in written:
            try:
                line = json.loads(each)
            except ValueError:
                break
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                break
            found.append(line)
        return found

    def back_to(self, step: int) -> None:
        """Forget the log behind a step: what follows is computed again, so no step stands there twice."""
        kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
        if self.log.exists():
            with writing(self.log):
                write_atomically(self.log, "".join(kept).encode())
