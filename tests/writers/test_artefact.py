"""A writer's folder: what is saved comes back, in PEFT's own layout, and nothing damaged or foreign is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load, load_file, save
from transformers import DynamicCache

from kvquilt.errors import InputError, WriterError, WriterMismatchError
from kvquilt.writers.artefact import load_writer, make_writer, read_manifest
from kvquilt.writers.folder import ADAPTER, CONFIG, MANIFEST, SOFT_TOKENS, WEIGHTS, load_folder, save_folder
from kvquilt.writers.trained import TRAINED
from tests.models import build, tiny
from tests.oracle import random_ids
from tests.writers.trained import contents, equal, random_encoder, random_links, random_parts, random_writer

FILES = {"kv-packet": {SOFT_TOKENS}, "sempic": {CONFIG, ADAPTER}, "joint": {CONFIG, ADAPTER, SOFT_TOKENS}}
kinds = pytest.mark.parametrize("kind", TRAINED)


@kinds
@pytest.mark.parametrize("prefix", [(), random_ids(9, 3)])
def test_what_is_saved_comes_back(kind: str, prefix: tuple[int, ...], tmp_path: Path) -> None:
    model = tiny()
    writer = random_writer(model, kind, prefix)
    recipe, metrics = {"lr": 5e-4, "targets": ("q_proj", "v_proj"), "steps": None}, {"kl": 0.25}
    assert writer.save(tmp_path / "w", recipe, metrics) == writer.digest
    loaded = load_writer(tmp_path / "w", model)
    assert equal(loaded, writer)
    assert (loaded.alpha, loaded.base_name) == (writer.alpha, "tiny-llama")
    assert equal(load_writer(tmp_path / "w"), writer)
    about = read_manifest(tmp_path / "w")
    assert about["recipe"] == {"lr": 5e-4, "targets": ["q_proj", "v_proj"], "steps": None}
    assert about["metrics"] == metrics
    assert about["base"]["name"] == "tiny-llama"
    assert about["base"]["dtype"] == "float32"
    assert about["base"]["fingerprint"] == model.fingerprint.digest
    segments = [random_ids(n, n) for n in (5, 21)]
    for (i, a), (j, b) in zip(writer.compile(model, segments), loaded.compile(model, segments), strict=True):
        assert i == j
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


@kinds
def test_two_saves_give_equal_bytes_and_a_loaded_writer_saves_the_same(kind: str, tmp_path: Path) -> None:
    writer = random_writer(tiny(), kind)
    writer.save(tmp_path / "a", {"x": 1}, {"y": 2.5})
    writer.save(tmp_path / "b", {"x": 1}, {"y": 2.5})
    load_writer(tmp_path / "a").save(tmp_path / "c", {"x": 1}, {"y": 2.5})
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert set(contents(tmp_path / "a")) == {MANIFEST, *FILES[kind]}


def test_saved_as_bfloat16_it_is_a_rounded_writer_of_its_own(tmp_path: Path) -> None:
    writer = random_writer(tiny())
    digest = writer.save(tmp_path, stored="bfloat16")
    loaded = load_writer(tmp_path, tiny())
    assert loaded.digest == digest != writer.digest
    for name, tensor in loaded.named().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, writer.named()[name].bfloat16().float())
    assert loaded.save(tmp_path, stored="bfloat16") == digest


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("targets", [("q_proj", "k_proj", "v_proj", "o_proj"), ("v_proj", "down_proj")])
def test_peft_loads_the_adapter_and_computes_the_same_keys_and_values(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model, ids = tiny(family), random_ids(17, 5)
    named = random_parts(model, 3, 0, 0, targets=targets)
    writer = make_writer("sempic", model.fingerprint, named, 5.0, base_name=model.name)
    writer.save(tmp_path)
    theirs = peft.PeftModel.from_pretrained(build(family), str(tmp_path), local_files_only=True).eval()
    cache = DynamicCache()
    with torch.inference_mode():
        theirs(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)
    [(_, segment)] = writer.compile(model, [ids])
    for layer, (keys, values) in enumerate(zip(segment.keys, segment.values, strict=True)):
        assert torch.allclose(keys, cache.layers[layer].keys[0], atol=1e-4)
        assert torch.allclose(values, cache.layers[layer].values[0], atol=1e-4)
    mine, again = load_file(tmp_path / ADAPTER), tmp_path / "again"
    theirs.save_pretrained(str(again), save_embedding_layers=False)  # else it looks for the base model online
    saved = load_file(again / ADAPTER)
    assert mine.keys() == saved.keys(), "PEFT itself would write these names"
    assert all(torch.equal(mine[name], saved[name]) for name in mine)


def test_the_names_in_the_adapter_are_pefts(tmp_path: Path) -> None:
    random_writer(tiny(), "sempic").save(tmp_path)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in load_file(tmp_path / ADAPTER)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 4, "LORA")
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_an_adapter_on_some_layers_names_them_in_full(tmp_path: Path) -> None:
    named = {
        n: t for n, t in random_parts(tiny(), 2, 0, 0).items() if n.startswith(("layers.0.self_attn.q", "layers.2"))
    }
    writer = make_writer("sempic", tiny().fingerprint, named, 2.0)
    writer.save(tmp_path)
    assert equal(load_writer(tmp_path, tiny()), writer)
    assert "layers.0.self_attn.q_proj" in json.loads((tmp_path / CONFIG).read_text())["target_modules"]


def test_a_changed_byte_anywhere_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    random_writer(tiny(), "joint", random_ids(3, 1)).save(tmp_path, {"lr": 0.5}, {"kl": 1.25})
    for name, data in contents(tmp_path).items():
        step = max(1, len(data) // 40)
        for at in range(0, len(data), step):
            changed = bytearray(data)
            changed[at] ^= 0x01
            (tmp_path / name).write_bytes(changed)
            if name == MANIFEST and json_or_none(bytes(changed)) == json_or_none(data):
                continue  # white space
            with pytest.raises(WriterError, match=name if name != MANIFEST else str(tmp_path)):
                load_writer(tmp_path)
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(WriterError, match="damaged"):
            load_writer(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(WriterError, match=f"{name} is missing"):
            load_writer(tmp_path)
        (tmp_path / name).write_bytes(data)
    load_writer(tmp_path)


def json_or_none(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def test_no_folder_or_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(WriterError, match="no such folder"):
        load_writer(tmp_path / "nowhere")
    with pytest.raises(WriterError, match=r"writer\.json is missing"):
        load_writer(tmp_path)
    for text in ("{}", "[]", "7", '{"format": "x"}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(WriterError, match="not that of a writer"):
            load_writer(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(WriterError, match="cannot be read"):
        load_writer(file)


def test_a_newer_format_says_so_even_if_everything_else_is_new(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"format": 2, "shape": []}')
    with pytest.raises(WriterError, match="format 2 by a newer kvquilt"):
        load_writer(tmp_path)


def test_a_file_that_is_not_this_writers(tmp_path: Path) -> None:
    random_writer(tiny(), "joint").save(tmp_path / "a")
    random_writer(tiny(), "kv-packet").save(tmp_path / "b")
    (tmp_path / "b" / ADAPTER).write_bytes((tmp_path / "a" / ADAPTER).read_bytes())
    with pytest.raises(WriterError, match=f"{ADAPTER} does not belong"):
        load_writer(tmp_path / "b")
    random_writer(tiny(), "joint", seed=5).save(tmp_path / "c")
    (tmp_path / "a" / SOFT_TOKENS).write_bytes((tmp_path / "c" / SOFT_TOKENS).read_bytes())
    with pytest.raises(WriterError, match=f"{SOFT_TOKENS} is damaged, or not the one"):
        load_writer(tmp_path / "a")


def forged(path: Path, about: dict[str, Any], files: dict[str, bytes]) -> None:
    """A folder whose checksums are right, whatever is in it."""
    about = {name: value for name, value in about.items() if name not in ("files", "checksum")}
    save_folder(path, about, files)


def altered(path: Path, **changes: Any) -> None:
    about, files = load_folder(path)
    for dotted, value in changes.items():
        at: Any = about
        *outer, last = dotted.split("__")
        for name in outer:
            at = at[name]
        at[last] = value
    forged(path, about, files)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "magic"}, "kind: unknown"),
        ({"kind": "of another sort", "sizes": {}}, "kind: unknown"),
        ({"kind": "kv-paket"}, "did you mean 'kv-packet'"),
        ({"kind": "sempic"}, "another digest"),
        ({"alpha": 5.0}, "lora_alpha is 4, but must be 5"),
        ({"alpha": "x"}, "another form"),
        ({"prefix": [-1]}, "must be token ids"),
        ({"prefix": [1, 2]}, "another digest"),
        ({"prefix": None}, "another form"),
        ({"base__weights": "0" * 64}, "another digest"),
        ({"base": {}}, "lacks something"),
        ({"sizes__rank": 3}, "says rank 3, the files have 2"),
        ({"sizes__header": 4}, "says header 4, the files have 2"),
        ({"sizes__width": 4}, "says width 4, the files have 64"),
        ({"sizes": {}}, "lacks something"),
        ({"stored": "bfloat16"}, "says 'bfloat16'"),
        ({"stored": "float64"}, "says 'float64'"),
        ({"digest": "0" * 64}, "another digest"),
    ],
)
def test_a_manifest_that_does_not_agree_with_its_files(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    random_writer(tiny(), "joint").save(tmp_path)
    altered(tmp_path, **changes)
    with pytest.raises(WriterError, match=said):
        load_writer(tmp_path)


@pytest.mark.parametrize("name", [SOFT_TOKENS, WEIGHTS])
def test_tensors_of_other_kinds_that_are_none(name: str, tmp_path: Path) -> None:
    writer = random_links(tiny()) if name == SOFT_TOKENS else random_encoder(tiny())
    writer.save(tmp_path)
    about, files = load_folder(tmp_path)
    forged(tmp_path, about, {**files, name: b"no tensors"})
    with pytest.raises(WriterError, match=f"{name} is no safetensors file"):
        load_writer(tmp_path)


def forged_adapter(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    about, files = load_folder(path)
    tensors = load(files[ADAPTER])
    change(tensors)
    forged(path, about, {**files, ADAPTER: save(tensors)})


NAME = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
OTHER = NAME.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: (t.pop(NAME), t.pop(OTHER)), "1 adapted layers are missing: layers.1.self_attn.v_proj"),
        (lambda t: t.pop(NAME), "v_proj.lora_B is there without layers.1.self_attn.v_proj.lora_A"),
        (
            lambda t: t.update({n.replace("layers.1", "layers.3"): x.clone() for n, x in t.items() if "layers.1" in n}),
            "4 adapted layers are too many: layers.3.self_attn.k_proj, layers.3.self_attn.o_proj",
        ),
        (lambda t: t.update({NAME: t[NAME][:, :-1].contiguous()}), "1 adapted layers are of another size"),
        (lambda t: t.update({OTHER: t[OTHER][:-1].contiguous()}), "1 adapted layers are of another size"),
        (lambda t: t.update({NAME: t[NAME][:1].contiguous()}), "lora_A must be of rank 2"),
        (lambda t: t.update({NAME: t[NAME][0].contiguous()}), "must be a matrix"),
        (lambda t: t[NAME].view(-1)[3].fill_(float("nan")), "v_proj.lora_A holds NaN or is infinite"),
        (lambda t: t[OTHER].view(-1)[3].fill_(float("inf")), "v_proj.lora_B holds NaN or is infinite"),
        (lambda t: t.update({NAME: t[NAME].half()}), r"is torch.float16, but writer.json says 'float32'"),
        (lambda t: t[NAME].mul_(2), "another digest"),
        (lambda t: t.update({NAME + "x": t[NAME].clone()}), "no LoRA matrix"),
        (
            lambda t: t.update({NAME.replace("lora_A.weight", "lora_magnitude_vector"): t[NAME].clone()}),
            "no LoRA matrix",
        ),
    ],
)
def test_an_adapter_of_other_tensors(
    change: Callable[[dict[str, torch.Tensor]], object], said: str, tmp_path: Path
) -> None:
    random_writer(tiny(), "joint").save(tmp_path)
    forged_adapter(tmp_path, change)
    with pytest.raises(WriterError, match=said):
        load_writer(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_rslora", True),
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["lm_head"]),
        ("layers_to_transform", [0]),
        ("peft_type", "LOHA"),
        ("init_lora_weights", "pissa"),
        ("r", 3),
        ("lora_alpha", 17),
        ("target_modules", ["q_proj"]),
        ("a_field_of_the_future", "on"),
    ],
)
def test_what_peft_would_compute_otherwise_is_refused_with_the_field(field: str, value: object, tmp_path: Path) -> None:
    random_writer(tiny(), "sempic").save(tmp_path)
    about, files = load_folder(tmp_path)
    config = {**json.loads(files[CONFIG]), field: value}
    forged(tmp_path, about, {**files, CONFIG: json.dumps(config).encode()})
    with pytest.raises(WriterError, match=f"{field} is "):
        load_writer(tmp_path)


def test_a_configuration_as_peft_writes_it_is_read(tmp_path: Path) -> None:
    random_writer(tiny(), "sempic").save(tmp_path)
    about, files = load_folder(tmp_path)
    mine = json.loads(files[CONFIG])
    known = {name: mine[name] for name in ("r", "lora_alpha", "target_modules", "task_type", "bias")}
    theirs = peft.LoraConfig(**known).to_dict()
    assert mine.items() <= {**theirs, "inference_mode": True, "base_model_name_or_path": "tiny-llama",
                            "target_modules": mine["target_modules"]}.items()  # fmt: skip
    text = json.dumps({**theirs, "target_modules": sorted(theirs["target_modules"])}).encode()
    forged(tmp_path, about, {**files, CONFIG: text})
    assert equal(load_writer(tmp_path), random_writer(tiny(), "sempic"))


def test_files_that_are_no_tensors_and_a_manifest_that_lists_others(tmp_path: Path) -> None:
    random_writer(tiny(), "joint").save(tmp_path)
    about, files = load_folder(tmp_path)
    forged(tmp_path, about, {**files, ADAPTER: b"\x80\x04."})
    with pytest.raises(WriterError, match=f"{ADAPTER} is no safetensors file"):
        load_writer(tmp_path)
    forged(tmp_path, about, {**files, CONFIG: b"[1]"})
    with pytest.raises(WriterError, match=f"{CONFIG} is no JSON object"):
        load_writer(tmp_path)
    forged(tmp_path, about, {name: data for name, data in files.items() if name != CONFIG})
    with pytest.raises(WriterError, match="lacks something"):
        load_writer(tmp_path)
    forged(tmp_path, about, {**files, "../secret": b""})
    with pytest.raises(WriterError, match=r"lists \.\./secret, which no writer has"):
        load_writer(tmp_path)


@pytest.mark.parametrize("field", ["weights", "tokenizer", "rope", "dtype"])
def test_another_base_model_is_refused_with_what_differs(field: str, tmp_path: Path) -> None:
    model = tiny()
    other = replace(model.fingerprint, **{field: "float16" if field == "dtype" else "f" * 64})
    make_writer("joint", other, random_writer(model).named(), 4.0, base_name="another").save(tmp_path)
    with pytest.raises(WriterMismatchError, match=f"for another in .*-llama in float32; what differs: {field}(;|$)"):
        load_writer(tmp_path, model)
    writer = load_writer(tmp_path)
    with pytest.raises(WriterMismatchError, match=field):
        list(writer.compile(model, [(1, 2)]))


def test_shapes_that_fit_do_not_make_it_another_models_writer(tmp_path: Path) -> None:
    random_writer(tiny("llama", 0)).save(tmp_path)
    with pytest.raises(WriterMismatchError, match=r"what differs: weights$"):
        load_writer(tmp_path, tiny("llama", 1))


@pytest.mark.parametrize(
    "change",
    [{"rank": 2, "layer": "layers.7.self_attn.q_proj"}, {"layer": "layers.0.self_attn"}, {"inputs": 32}, {"width": 32}],
)
def test_parts_that_the_model_has_no_place_for(change: dict[str, Any], tmp_path: Path) -> None:
    name, inputs = change.get("layer", "layers.0.self_attn.q_proj"), change.get("inputs", 64)
    named = {f"{name}.lora_A": torch.ones(2, inputs), f"{name}.lora_B": torch.ones(64, 2)}
    named["header"] = torch.ones(1, change.get("width", 64))
    make_writer("joint", tiny().fingerprint, named, 2.0).save(tmp_path)
    with pytest.raises(WriterMismatchError, match="header" if "width" in change else name):
        load_writer(tmp_path, tiny())


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    writer = random_writer(tiny())
    with pytest.raises(InputError, match="plain JSON"):
        writer.save(tmp_path, {"a": object()})
    with pytest.raises(InputError, match="plain JSON"):
        writer.save(tmp_path, {}, {"kl": float("nan")})
    with pytest.raises(InputError, match="stored"):
        writer.save(tmp_path, stored="float16")
    assert not contents(tmp_path)
