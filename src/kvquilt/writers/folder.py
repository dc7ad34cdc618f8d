"""The folder of a trained writer: ``writer.json`` with checksums of the files beside it, replaced as a whole.

Files of other names may lie in it and are left alone. A new version is first written to a folder inside, its
``writer.json`` last: from then on it is the one that counts, wherever the process ends, and whoever saves next tidies
up.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvquilt.errors import InputError, WriterError
from kvquilt.files import write_atomically

MANIFEST = "writer.json"
CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
SOFT_TOKENS, WEIGHTS = "soft_tokens.safetensors", "weights.safetensors"
FILES = (CONFIG, ADAPTER, SOFT_TOKENS, WEIGHTS)
FORMAT = 1
_STAGED = ".staged"


def save_folder(path: Path, about: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Replace the folder's version by this one; same arguments, same bytes.

    Args:
        about: JSON that goes into ``writer.json``.
        files: by name, of `FILES`; those that this version lacks are removed.

    Raises:
        InputError: `about` is no JSON, or holds NaN.
        OSError: as the file system gives it; the version before stays whole.
    """
    try:
        fields = json.loads(json.dumps({"format": FORMAT, **about}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError("recipe, metrics", f"must be plain JSON without NaN: {error}") from error
    fields["files"] = {
        name: {"blake3": blake3(data).hexdigest(), "bytes": len(data)} for name, data in sorted(files.items())
    }
    fields["checksum"] = _checksum(fields)
    staged = path / _STAGED
    if (staged / MANIFEST).exists():
        _publish(path)
    shutil.rmtree(staged, ignore_errors=True)
    for name, data in files.items():
        write_atomically(staged / name, data)
    write_atomically(staged / MANIFEST, (json.dumps(fields, indent=2) + "\n").encode())
    _publish(path)


def load_folder(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What ``writer.json`` says, and the files it names, all verified.

    Raises:
        WriterError: says what is missing, damaged or not understood.
    """
    while True:
        home, raw = _version(path)
        try:
            return _verified(path, home, raw)
        except WriterError:
            if _version(path) == (home, raw):
                raise  # else another process has replaced it meanwhile, such as training by a better one


def _version(path: Path) -> tuple[Path, bytes]:
    """Where the version that counts lies, and its ``writer.json``."""
    try:
        return path / _STAGED, (path / _STAGED / MANIFEST).read_bytes()
    except OSError:
        return path, _bytes(path, path / MANIFEST)


def _verified(path: Path, home: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    fields = _parsed(path, raw)
    sums = fields["files"]
    if stray := [name for name in FILES if name not in sums and (home / name).exists()]:
        raise WriterError(f"{path}: {', '.join(stray)} does not belong to this {MANIFEST}")
    files = {name: _bytes(path, home / name) for name in sums}
    for name, data in files.items():
        if len(data) != sums[name]["bytes"] or blake3(data).hexdigest() != sums[name]["blake3"]:
            raise WriterError(f"{path}: {name} is damaged, or not the one that was saved with this {MANIFEST}")
    return fields, files


def _parsed(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise WriterError(f"{path}: {MANIFEST} is damaged: it is no JSON") from error
    version = fields.get("format") if isinstance(fields, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise WriterError(f"{path}: written in format {version} by a newer kvquilt; this one reads up to {FORMAT}")
    if version != FORMAT:
        raise WriterError(f"{path}: {MANIFEST} is not that of a writer (format {version!r})")
    if fields.pop("checksum", None) != _checksum(fields):
        raise WriterError(f"{path}: {MANIFEST} is damaged: its checksum is another")
    sums = fields.get("files")
    if not isinstance(sums, dict) or not all(
        isinstance(s, dict) and {"blake3", "bytes"} <= {*s} for s in sums.values()
    ):
        raise WriterError(f"{path}: {MANIFEST} does not list its files with their checksums")
    if unknown := sorted(set(sums) - set(FILES)):
        raise WriterError(f"{path}: {MANIFEST} lists {', '.join(unknown)}, which no writer has")
    return dict(fields)


def _bytes(path: Path, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        what = f"{file.name} is missing" if path.is_dir() else "there is no such folder"
        raise WriterError(f"{path}: {what}") from error
    except OSError as error:
        raise WriterError(f"{path}: {file.name} cannot be read ({error.strerror})") from error


def _publish(path: Path) -> None:
    """Take over the complete staged version; may end at any point and be repeated."""
    staged = path / _STAGED
    there = [name for name in FILES if (staged / name).exists()]
    for name in (*there, MANIFEST):
        write_atomically(staged / "next", (staged / name).read_bytes())  # here, where whatever is left is cleared
        (staged / "next").replace(path / name)
    for name in set(FILES) - set(there):
        (path / name).unlink(missing_ok=True)
    (staged / MANIFEST).unlink()
    shutil.rmtree(staged)


def _checksum(fields: Mapping[str, Any]) -> str:
    return blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest()
