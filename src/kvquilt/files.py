"""Writing a file so that readers see the old one or the whole new one, never a part."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write `data` to a temporary name beside `path`, fsync, rename. Creates the folder.

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


def _mode(path: Path) -> int | None:
    """Permissions of a file; None where there is none."""
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        return None
