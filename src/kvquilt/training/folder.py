"""The folder of a training run: who may write it, its log, its state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvquilt.errors import InputError, StoreUnavailableError
from kvquilt.files import write_atomically


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

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else trains into it meanwhile.

        Raises:
            InputError: somebody does.
            StoreUnavailableError: the folder cannot be written.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                raise InputError("out", "another process trains into this folder", str(self.path)) from None
        try:
            yield
        finally:
            lock.release()

    def note(self, line: Mapping[str, Any]) -> None:
        """Add a line to the log."""
        with writing(self.log), self.log.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
            out.flush()
            os.fsync(out.fileno())

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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `StoreUnavailableError` where the file system refuses."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError(f"{path} cannot be written: {error.strerror or error}") from error
