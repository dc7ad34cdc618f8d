"""Writing files: whole or not at all, or a line at a time; folders that one process holds."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvquilt.errors import InputError, StoreUnavailableError


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write `data` to a temporary name beside `path`, fsync, rename: readers see the old file or the whole new one.

    Creates the folder.

    Args:
        private: nobody but the owner may read the file. Else its mode is what an ordinary open would give: by the
            umask, or that of the file which was there.

    Raises:
        OSError: as the file system gives it; no temporary file is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    kept = None if private else _mode(path)
    created = 0o600 if private else 0o666 if kept is None else kept
    try:
        # the kernel takes the umask off: reading it here would mean to set it, for every thread
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, created)) as file:
            if kept is not None:
                temporary.chmod(kept)  # what its owner allowed beyond the umask
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def add_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line of JSON, on disk when this returns.

    Raises:
        StoreUnavailableError: the file cannot be written.
    """
    with writing(path), path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def held(folder: Path, field: str, does: str) -> Iterator[None]:
    """Nobody else holds the folder meanwhile. Creates it.

    Args:
        field: what named the folder.
        does: what the other process does with it.

    Raises:
        InputError: somebody does.
        StoreUnavailableError: the folder cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise InputError(field, f"another process {does} this folder", str(folder)) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `StoreUnavailableError` where the file system refuses."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError(f"{path} cannot be written: {error.strerror or error}") from error


def _mode(path: Path) -> int | None:
    """Permissions of a file; None where there is none."""
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        return None
