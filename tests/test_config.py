import os
from pathlib import Path

import pytest

from kvquilt.config import Settings
from kvquilt.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVQUILT_"):
            monkeypatch.delenv(name)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_say_so() -> None:
    settings, sources = Settings.resolve()
    assert settings.model == "smollm2"
    assert settings.memory_bytes == 4 << 30
    assert set(sources) == set(Settings.model_fields)
    assert set(sources.values()) == {"default"}


def test_later_sources_win_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOP_K", "MODEL", "THREADS"):
        monkeypatch.setenv(f"KVQUILT_{name}", "1")
    file = write(tmp_path / "c.yaml", "top_k: 2\nmodel: two\n")
    settings, sources = Settings.resolve(file, {"top_k": 3, "dtype": None})
    assert (settings.threads, settings.model, settings.top_k, settings.dtype) == (1, "two", 3, None)
    assert sources["threads"] == "environment KVQUILT_THREADS"
    assert sources["model"] == f"file {file}"
    assert sources["top_k"] == "flag"
    assert sources["dtype"] == "default"


def test_the_environment_can_name_the_file_and_the_flag_overrides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQUILT_CONFIG", str(write(tmp_path / "a.yaml", "top_k: 2")))
    assert Settings.resolve()[0].top_k == 2
    assert Settings.resolve(write(tmp_path / "b.yaml", "top_k: 7"))[0].top_k == 7


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("1.5 MiB", 3 << 19), ("1000", 1000), ("2GB", 2 * 10**9)]
)
def test_sizes_may_carry_units(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("KVQUILT_DISK_BYTES", text)
    assert Settings.resolve()[0].disk_bytes == size


def test_unknown_names_are_errors_with_the_nearest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"stor_dir.*file.*did you mean 'store_dir'"):
        Settings.resolve(write(tmp_path / "c.yaml", "stor_dir: /x"))
    with pytest.raises(ConfigError, match="did you mean 'max_new_tokens'"):
        Settings.resolve(flags={"max_new_token": 3})
    monkeypatch.setenv("KVQUILT_STORE_DIRR", "/x")
    with pytest.raises(ConfigError, match=r"KVQUILT_STORE_DIRR.*did you mean 'KVQUILT_STORE_DIR'"):
        Settings.resolve()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("top_k", "0", "greater than or equal to 1"),
        ("memory_bytes", "lots", "byte"),
        ("memory_bytes", "-1", "byte"),
        ("dtype", "int8", "float32"),
        ("gate_min_top1", "1.5", "less than or equal to 1"),
        ("threads", "many", "valid integer"),
        ("budget", "-5%", "a share lies between 0% and 100%"),
        ("budget", "120%", "a share lies between 0% and 100%"),
        ("budget", "some", "write a share such as 5%"),
    ],
)
def test_invalid_values_name_field_source_input_and_rule(
    monkeypatch: pytest.MonkeyPatch, field: str, value: str, rule: str
) -> None:
    monkeypatch.setenv(f"KVQUILT_{field.upper()}", value)
    with pytest.raises(ConfigError) as caught:
        Settings.resolve()
    message = str(caught.value)
    assert message.startswith(f"{field} (environment KVQUILT_{field.upper()}): ")
    assert rule in message
    assert repr(value) in message


@pytest.mark.parametrize(
    ("text", "rule"), [("- a", "name: value"), ("a: [", "not valid YAML"), ("1: 2", "name: value")]
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Settings.resolve(write(tmp_path / "c.yaml", text))


@pytest.mark.parametrize(("text", "budget"), [("5%", "5%"), ("0.15", "15%"), ("13000", "13000"), ("null", None)])
def test_a_budget_is_written_one_way(tmp_path: Path, text: str, budget: str | None) -> None:
    assert Settings.resolve(write(tmp_path / "c.yaml", f"budget: {text}"))[0].budget == budget


def test_a_missing_file_is_refused_and_an_empty_one_is_fine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Settings.resolve(tmp_path / "none.yaml")
    assert Settings.resolve(write(tmp_path / "c.yaml", ""))[1]["model"] == "default"


def test_folders_expand_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQUILT_STORE_DIR", "~/segments")
    assert Settings.resolve()[0].store_dir == Path.home() / "segments"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings.resolve()[0].model = "other"


SECRET = "geheim"


def test_a_remote_tier_is_known_by_its_url_and_its_secrets_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQUILT_REMOTE", f"valkey://me:{SECRET}@host:7000/2?deadline=0.5")
    settings, sources = Settings.resolve()
    assert settings.remote is not None
    assert (settings.remote.host, settings.remote.password, settings.remote.limits.deadline) == ("host", SECRET, 0.5)
    assert sources["remote"] == "environment KVQUILT_REMOTE"
    monkeypatch.setenv("KVQUILT_REMOTE", "valkey://host")
    monkeypatch.setenv("KVQUILT_REMOTE_PASSWORD", SECRET)
    apart = Settings.resolve()[0]
    assert apart.remote_place is not None
    assert apart.remote_place.password == SECRET
    for each in (settings, apart):
        shown = f"{each!r} {each} {each.model_dump()} {each.model_dump_json()}"
        assert SECRET not in shown
        assert "valkey://" in each.model_dump_json()
    assert Settings.resolve(flags={"remote": "s3://bucket"})[0].remote_place is not None
    monkeypatch.delenv("KVQUILT_REMOTE")
    assert Settings.resolve()[0].remote_place is None


@pytest.mark.parametrize("url", [f"http://{SECRET}@host", f"valkey://:{SECRET}@host?tt=1", f"valkey://:{SECRET}@h:p"])
def test_a_wrong_remote_is_refused_without_being_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    for source in ("environment", "file"):
        if source == "environment":
            monkeypatch.setenv("KVQUILT_REMOTE", url)
        else:
            monkeypatch.delenv("KVQUILT_REMOTE")
        with pytest.raises(ConfigError, match=rf"^remote \({source} ") as caught:
            Settings.resolve(write(tmp_path / "c.yaml", f"remote: {url}" if source == "file" else ""))
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None
    with pytest.raises(ConfigError, match=r"^remote \(flag\)"):
        Settings.resolve(flags={"remote": 3})
