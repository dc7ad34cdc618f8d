"""The store's directory: where files lie, how they are published, mapped and listed.

<root>/kvquilt-store.json                              names the format
<root>/v1/<namespace>/<digest[:2]>/<digest>.safetensors
<root>/v1/<namespace>/notes/<name>.json
<root>/v1/index.sqlite                                 accounting only: the files are the truth
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvquilt.errors import InputError, StoreUnavailableError
from kvquilt.identity import SegmentKey
from kvquilt.store.base import MissReason
from kvquilt.store.format import DamageError

if TYPE_CHECKING:
    import torch

_FORMAT = 1
_MARKER = "kvquilt-store.json"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{32,64}")  # nothing below 128 bits becomes a file name
_STALE_SECONDS = 3600


class Files:
    """Paths below one root. Opening creates the directory, or finds it readable only (`writable` is False).

    Raises `StoreUnavailableError` where it can neither be created nor read, or is of another format.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.base = self.root / f"v{_FORMAT}"
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._check_format()
            self.base.mkdir(exist_ok=True, mode=0o700)
            os.listdir(self.base)
        except OSError as error:
            raise StoreUnavailableError(f"store directory {self.root}: {error.strerror or error}") from error
        self.writable = os.access(self.base, os.W_OK | os.X_OK)

    def path(self, key: SegmentKey) -> Path:
        if not is_namespace(key.namespace) or not is_digest(key.digest):
            raise InputError("key", "a namespace of 32 and a digest of at least 32 lower-case hex digits", str(key))
        return self.base / name_of_key(key)

    def scan(self, namespace: str | None = None) -> Iterator[tuple[SegmentKey, int]]:
        """Every segment file and its size; what vanishes meanwhile or may not be read is left out."""
        for space in _directories(self.base) if namespace is None else [self.base / namespace]:
            if not is_namespace(space.name):
                continue
            for shard in _directories(space):
                for entry in _entries(shard):
                    digest, dot, suffix = entry.name.partition(".")
                    if suffix != "safetensors" or not dot or not is_digest(digest) or digest[:2] != shard.name:
                        continue
                    try:
                        size = entry.stat().st_size
                    except OSError:
                        continue
                    yield SegmentKey(space.name, digest), size

    @contextmanager
    def staged(self, path: Path, parts: Sequence[bytes | memoryview]) -> Iterator[Staged]:
        """Write `parts` to a temporary file beside `path`; the body publishes it, else it disappears."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        staged = Staged(path.parent / f".{os.getpid()}-{secrets.token_hex(8)}.tmp", path)
        try:
            staged.write(parts)
            yield staged
            if staged.published:
                _sync_directory(path.parent)
        finally:
            if not staged.published:
                staged.temporary.unlink(missing_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        with self.staged(path, [content]) as staged:
            staged.publish()

    def sweep(self) -> int:
        """Remove temporary files that nobody will finish; returns how many."""
        removed = 0
        folders = [shard for space in _directories(self.base) for shard in _directories(space)]
        for folder in [self.root, *folders]:
            for entry in _entries(folder):
                if entry.name.startswith(".") and entry.name.endswith(".tmp") and _abandoned(entry):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
                        removed += 1
        return removed

    def _check_format(self) -> None:
        marker = self.root / _MARKER
        try:
            found = json.loads(marker.read_bytes())["format"]
        except FileNotFoundError:
            names = sorted(e.name for e in _entries(self.root) if not e.name.startswith("."))
            others = [n for n in names if re.fullmatch(r"v\d+", n)]
            strangers = [n for n in names if n not in others and n != _MARKER]
            if strangers and self.base.name not in others:
                raise StoreUnavailableError(
                    f"store directory {self.root}: holds something else ({strangers[0]!r}, {len(strangers)} in all), "
                    "so it is no store; name an empty or a new directory"
                ) from None
            if not others or self.base.name in others:
                with contextlib.suppress(OSError):  # a store that can only be read works without its marker
                    self.write(marker, json.dumps({"format": _FORMAT}).encode())
                return
            found = ", ".join(sorted(others))
        except (ValueError, KeyError, TypeError):
            found = "unreadable"
        if found != _FORMAT:
            raise StoreUnavailableError(
                f"store directory {self.root}: format {found}, this version of kvquilt reads {_FORMAT}; "
                "name another directory or remove this one"
            )


def name_of_key(key: SegmentKey) -> str:
    """Where the segment lies below the folder of its format's version."""
    return f"{key.namespace}/{key.digest[:2]}/{key.digest}.safetensors"


def key_of_name(name: str) -> SegmentKey | None:
    """The key of such a name; None for any other."""
    namespace, _, rest = name.partition("/")
    key = SegmentKey(namespace, rest.rpartition("/")[2].removesuffix(".safetensors"))
    return key if is_namespace(namespace) and is_digest(key.digest) and name_of_key(key) == name else None


def is_namespace(text: str) -> bool:
    return _NAMESPACE.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


class Staged:
    """A temporary file on its way to `target`."""

    def __init__(self, temporary: Path, target: Path) -> None:
        self.temporary, self.target = temporary, target
        self.published = False

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        handle = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)

    def publish(self) -> None:
        os.replace(self.temporary, self.target)
        self.published = True


def map_file(path: Path) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """The file's bytes as a uint8 tensor on a private map, and the identity of exactly that file.

    The map is copy-on-write, so even a stray write could not reach the file, and it holds no descriptor: a
    memory tier may keep thousands of them. It outlives the file's removal.
    """
    import torch

    handle = os.open(path, os.O_RDONLY)
    try:
        info = os.fstat(handle)
        if info.st_size < 8:
            raise DamageError(MissReason.TRUNCATED)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        opened = f"/proc/self/fd/{handle}"  # the very file that was measured, should another replace it now
        name = opened if os.path.exists(opened) else str(path)
        content = torch.from_file(name, shared=False, size=info.st_size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"cannot map a store file: {type(error).__name__}") from error
    finally:
        os.close(handle)
    return content, (info.st_ino, info.st_size, info.st_mtime_ns)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _directories(path: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(path) if entry.is_dir(follow_symlinks=False)]


def _abandoned(entry: os.DirEntry[str]) -> bool:
    try:
        if time.time() - entry.stat().st_mtime > _STALE_SECONDS:
            return True
        os.kill(int(entry.name[1:].partition("-")[0]), 0)
    except (ProcessLookupError, ValueError):
        return True
    except OSError:  # the process exists and belongs to somebody else, or the file is gone
        return False
    return False
