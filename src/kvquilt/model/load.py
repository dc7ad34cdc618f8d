"""Find and load a model: a Hugging Face id, a local folder, a GGUF file, or the embedded default `smollm2`."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvquilt.config import Settings
from kvquilt.errors import InputError, ModelNotFoundError, UnsupportedModelError, nearest
from kvquilt.files import write_atomically
from kvquilt.identity import digest_fields
from kvquilt.model.gguf import convert_gguf, smollm2_folder
from kvquilt.model.language_model import LanguageModel

log = logging.getLogger(__name__)
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
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
        name_or_path: folder or ``.gguf`` file, else a name inside `settings.models_dir`, else ``smollm2`` or a Hugging
            Face id.
        dtype: ``bfloat16``, ``float16`` or ``float32``; the model's own if not given (`gguf_dtype` for GGUF files).
        device: a torch device; CUDA if there is one, else the CPU.
        threads: sets torch's thread count for the process; left alone if not given.

    Raises:
        InputError: an unknown dtype, a device that is not there, a thread count below 1.
        ModelNotFoundError: nothing there, or a folder without weights or tokenizer.
        UnsupportedModelError: the model's cache cannot be reused; says why.
        ModelError: a GGUF file that cannot be unpacked into the cache directory.
    """
    settings = settings or Settings.resolve()[0]
    if dtype is not None and dtype not in DTYPES:
        raise InputError("dtype", f"must be one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}", dtype)
    if threads is not None:
        if threads < 1:
            raise InputError("threads", "must be at least 1", threads)
        torch.set_num_threads(threads)
    place = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    source = resolve(name_or_path, dtype, settings)
    _check_architecture(source, name_or_path)
    tokenizer = _tokenizer(source, name_or_path)
    try:
        hf = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype] if dtype else "auto")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelNotFoundError(f"{name_or_path}: the weights could not be loaded: {error}") from error
    hf.to(place)  # type: ignore[arg-type]
    if hf.dtype == torch.bfloat16 and place.type == "cpu" and not _bfloat16_on_cpu():
        log.warning("%s: this CPU has no instructions for bfloat16; float32 is faster on it", name_or_path)
    return LanguageModel.wrap(hf, tokenizer, name_or_path, weights_digest(hf, Path(source), settings.cache_dir))


def gguf_dtype() -> str:
    """What a GGUF file is unpacked to unless told: it is in neither, so whatever this machine computes faster."""
    return "bfloat16" if torch.cuda.is_available() or _bfloat16_on_cpu() else "float32"


def _bfloat16_on_cpu() -> bool:
    """Has it instructions for that? Without them a forward takes several times as long as in float32."""
    has = torch.cpu.get_capabilities()
    if has.get("architecture") == "x86_64":
        return any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "avx10_1"))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # true of any AVX512, which says nothing there


def resolve(name_or_path: str, dtype: str | None, settings: Settings) -> str:
    """The folder to load from; ``owner/name`` that is nowhere on this machine is returned as a Hugging Face id.

    Raises:
        ModelNotFoundError: neither.
    """
    path = Path(name_or_path).expanduser()
    if not path.exists() and settings.models_dir is not None and (settings.models_dir / name_or_path).exists():
        path = settings.models_dir / name_or_path
    if path.is_dir():
        return str(path)
    if path.is_file() and path.suffix == ".gguf":
        return str(convert_gguf(path, settings.cache_dir, dtype or gguf_dtype()))
    if name_or_path == "smollm2":
        return str(smollm2_folder(settings.cache_dir, dtype or gguf_dtype()))
    if path.exists() or path.is_absolute() or name_or_path.startswith((".", "~")) or path.suffix == ".gguf":
        raise ModelNotFoundError(f"{name_or_path}: not a model folder or a .gguf file")
    if "/" not in name_or_path:
        # the few Hugging Face ids without an owner are not worth minutes of retries on every mistyped name
        raise ModelNotFoundError(
            f"{name_or_path}: no such folder, file or known name{nearest(name_or_path, ['smollm2'])}; "
            "a Hugging Face id has the form owner/name"
        )
    return name_or_path


def _device(name: str) -> torch.device:
    """The torch device `name`, tried once: torch itself notices only late that one is not there."""
    try:
        place = torch.device(name)
    except (RuntimeError, TypeError):
        raise InputError("device", "must be a torch device, such as cpu or cuda:0", name) from None
    try:
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError, NotImplementedError):  # a build without CUDA raises an AssertionError
        raise InputError("device", "is not there, or this build of torch cannot use it", name) from None
    return place


def _check_architecture(source: str, name: str) -> None:
    """Refuse what is no causal language model of transformers before its weights are read."""
    try:
        config = AutoConfig.from_pretrained(source)
    except OSError as error:
        raise ModelNotFoundError(f"{name}: the configuration could not be loaded: {_first_line(error)}") from error
    except (ValueError, KeyError) as error:
        rule = f"transformers cannot read its configuration: {_first_line(error)}"
        raise UnsupportedModelError(f"{name}: {rule}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "an encoder-decoder" if config.is_encoder_decoder else "none of transformers' causal language models"
        raise UnsupportedModelError(f"{name}: a model of type {config.model_type!r} is {kind}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _tokenizer(source: str, name: str) -> PreTrainedTokenizerBase:
    folder = Path(source)
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise ModelNotFoundError(f"{name}: has no tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"{name}: no tokenizer could be loaded: {_first_line(error)}") from error
    if not getattr(tokenizer, "is_fast", False) or not len(tokenizer):
        raise ModelNotFoundError(f"{name}: a fast tokenizer (tokenizer.json) is needed and is not there")
    return tokenizer


def weights_digest(hf: PreTrainedModel, source: Path | None = None, cache_dir: Path | None = None) -> str:
    """blake3 over every parameter and persistent buffer as loaded, by name, dtype, shape and bytes.

    Reading gigabytes at each start would be slow, so the digest of a local folder is remembered for as long as its
    files keep path, device, name, size, inode and modification time. A memo that cannot be read or written costs only
    time, and a warning.
    """
    memo = None
    if source is not None and cache_dir is not None and source.is_dir():
        try:
            memo = cache_dir / "digests" / f"{_mark(hf, source)}.json"
            return str(json.loads(memo.read_text())["weights"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("weight digest memo is unreadable (%s); computing it anew", type(error).__name__)
    state = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(hf.state_dict().items()):
        state.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        state.update(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
    digest = state.hexdigest()
    if memo is not None:
        try:
            write_atomically(memo, json.dumps({"weights": digest}).encode())
        except OSError as error:
            log.warning("weight digest memo could not be kept (%s); the next start computes it anew", error.strerror)
    return digest


def _mark(hf: PreTrainedModel, source: Path) -> str:
    """What changes with the files of `source`; an inode alone means nothing on another device."""
    folder = source.resolve()
    files = [(p.name, p.stat()) for p in sorted(folder.iterdir()) if p.is_file()]
    stats = [(name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in files]
    named = {"folder": os.fsencode(folder), "files": repr(stats).encode(), "dtype": str(hf.dtype).encode()}
    return digest_fields("kvquilt 2026-11 weight files v2", list(named.items()))
