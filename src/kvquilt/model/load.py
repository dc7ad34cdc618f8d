"""Find and load a model: a Hugging Face id, a local folder, a GGUF file, or the embedded default `smollm2`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvquilt.config import Settings
from kvquilt.errors import InputError, ModelNotFoundError, nearest
from kvquilt.files import write_atomically
from kvquilt.identity import digest_fields
from kvquilt.model.gguf import convert_gguf, smollm2_folder
from kvquilt.model.language_model import LanguageModel

log = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(
    name_or_path: str = "smollm2",
    dtype: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    settings: Settings | None = None,
) -> LanguageModel:
    """Load a model for reuse; works without a network for everything that is on this machine.

    Args:
        name_or_path: Hugging Face id, folder, ``.gguf`` file, a name inside `settings.models_dir`, or ``smollm2``.
        dtype: ``bfloat16``, ``float16`` or ``float32``; the model's own if not given (bfloat16 for GGUF files).
        device: a torch device; CUDA if there is one, else the CPU.
        threads: sets torch's thread count for the process; left alone if not given.

    Raises:
        ModelNotFoundError: nothing there, or a folder without weights or tokenizer.
        UnsupportedModelError: the model's cache cannot be reused; says why.
    """
    settings = settings or Settings.resolve()[0]
    if dtype is not None and dtype not in DTYPES:
        raise InputError("dtype", f"must be one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}", dtype)
    if threads is not None:
        if threads < 1:
            raise InputError("threads", "must be at least 1", threads)
        torch.set_num_threads(threads)
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise InputError("device", "must be a torch device, such as cpu or cuda:0", device) from None
    source = resolve(name_or_path, dtype, settings)
    tokenizer = _tokenizer(source, name_or_path)
    try:
        hf = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype] if dtype else "auto")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelNotFoundError(f"{name_or_path}: the weights could not be loaded: {error}") from error
    hf.to(place)  # type: ignore[arg-type]
    return LanguageModel.wrap(hf, tokenizer, name_or_path, weights_digest(hf, Path(source), settings.cache_dir))


def resolve(name_or_path: str, dtype: str | None, settings: Settings) -> str:
    """The folder to load from; a name that is nowhere on this machine is returned as a Hugging Face id."""
    path = Path(name_or_path).expanduser()
    if not path.exists() and settings.models_dir is not None and (settings.models_dir / name_or_path).exists():
        path = settings.models_dir / name_or_path
    if path.is_dir():
        return str(path)
    if path.is_file() and path.suffix == ".gguf":
        return str(convert_gguf(path, settings.cache_dir, dtype or "bfloat16"))
    if name_or_path == "smollm2":
        return str(smollm2_folder(settings.cache_dir, dtype or "bfloat16"))
    if path.exists() or path.is_absolute() or name_or_path.startswith("."):
        raise ModelNotFoundError(f"{name_or_path}: not a model folder or a .gguf file")
    return name_or_path


def _tokenizer(source: str, name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"{name}: no tokenizer could be loaded: {error}") from error
    if not getattr(tokenizer, "is_fast", False) or not len(tokenizer):
        raise ModelNotFoundError(f"{name}: a fast tokenizer (tokenizer.json) is needed and is not there")
    return tokenizer


def weights_digest(hf: PreTrainedModel, source: Path | None = None, cache_dir: Path | None = None) -> str:
    """blake3 over every parameter and persistent buffer as loaded, by name, dtype, shape and bytes.

    Reading gigabytes at each start would be slow, so the digest of a local folder is remembered for as long as its
    weight files keep name, size, inode and modification time.
    """
    memo = None
    if source is not None and cache_dir is not None and source.is_dir():
        stats = [(p.name, s.st_size, s.st_ino, s.st_mtime_ns) for p in sorted(source.iterdir()) for s in [p.stat()]]
        mark = digest_fields("kvquilt 2026-11 weight files v1", [("files", repr(stats)), ("dtype", str(hf.dtype))])
        memo = cache_dir / "digests" / f"{mark}.json"
        if memo.exists():
            try:
                return str(json.loads(memo.read_text())["weights"])
            except (OSError, ValueError, KeyError) as error:
                log.warning("weight digest memo is unreadable (%s); computing it anew", type(error).__name__)
    state = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(hf.state_dict().items()):
        state.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        state.update(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
    digest = state.hexdigest()
    if memo is not None:
        write_atomically(memo, json.dumps({"weights": digest}).encode())
    return digest
