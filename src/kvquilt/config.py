"""Settings: one frozen object whose every value knows where it came from.

Lowest to highest: the default, the environment (``KVQUILT_*``), a YAML file, what the caller gave as a flag.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from platformdirs import user_cache_path, user_data_path
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    InstanceOf,
    PlainSerializer,
    SecretStr,
    ValidationError,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvquilt.errors import ConfigError, InputError, nearest
from kvquilt.remote import Remote
from kvquilt.repair.budget import Budget

_PREFIX = "KVQUILT_"
_GIB = 1 << 30
_SECRET = ("remote", "remote_password")  # never quoted, not even by an error


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("there is no home directory of that user") from None


def _budget(given: object) -> str | None:
    """A budget as `Budget` writes it. Checked here, so that the error names the setting's source."""
    if given is None:
        return None
    try:
        return str(Budget.parse(given))
    except InputError as error:
        raise ValueError(error.rule) from None


def _remote(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        return Remote.parse(given)
    except InputError as error:
        raise ValueError(error.rule if error.got is None else f"{error.rule} (got {error.got!r})") from None


Folder = Annotated[Path, AfterValidator(_expanded)]
Sources = dict[str, str]


class Settings(BaseSettings):
    """What kvquilt can be told from outside. Sizes accept ``4GiB``; ``None`` means: let kvquilt choose."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    store_dir: Folder = Field(
        default_factory=lambda: user_data_path("kvquilt") / "store", description="where compiled segments are kept"
    )
    cache_dir: Folder = Field(
        default_factory=lambda: user_cache_path("kvquilt"), description="converted models and the last answer"
    )
    models_dir: Folder | None = Field(
        None, description="folder with local models, for names that are no path from here"
    )
    memory_bytes: ByteSize = Field(ByteSize(4 * _GIB), ge=0, description="budget of the memory tier")
    disk_bytes: ByteSize = Field(ByteSize(50 * _GIB), ge=0, description="budget of the disk tier")
    remote: Annotated[
        InstanceOf[Remote] | None, NoDecode, BeforeValidator(_remote), PlainSerializer(lambda v: v and str(v))
    ] = Field(None, description="a tier that machines share: valkey://HOST:PORT/DB or s3://BUCKET/PREFIX?endpoint=URL")
    remote_password: SecretStr | None = Field(None, description="of the remote tier, unless its URL has one")
    model: str = Field("smollm2", min_length=1, description="Hugging Face id, local path, GGUF file or smollm2")
    helper_model: str | None = Field(
        None, min_length=1, description="a second, small model for methods that ask one, named like model"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="of weights and caches")
    device: str | None = Field(None, min_length=1, description="torch device, such as cpu or cuda:0")
    threads: int | None = Field(None, ge=1, description="CPU threads of torch")
    method: str = Field("auto", min_length=1, description="how documents are reused, such as auto, none or epic:k=16")
    budget: Annotated[str | None, BeforeValidator(_budget)] = Field(
        None, description="what a named method may spend beyond pure reuse: a share such as 5%, or token-layers"
    )
    policy: Literal["auto", "always"] | None = Field(
        None, description="auto obeys the gate, always runs the method regardless; by default always for a named method"
    )
    max_new_tokens: int = Field(128, ge=1, description="longest answer in tokens")
    gate_max_kl: float = Field(0.3, gt=0, description="mean KL per token to full prefill that still passes")
    gate_min_top1: float = Field(0.85, ge=0, le=1, description="share of equal top tokens that still passes")
    gate_seconds: float = Field(20, gt=0, description="time that compile spends on its closing gate")
    passage_tokens: int = Field(256, ge=16, description="longest passage that files are split into")
    top_k: int = Field(4, ge=1, description="passages retrieved for one question")
    tenant: str | None = Field(None, min_length=1, description="whose segments; tenants never share")

    @classmethod
    def resolve(
        cls, config_file: Path | str | None = None, flags: Mapping[str, Any] | None = None
    ) -> tuple[Settings, Sources]:
        """Settings from every source, and for each field ``default``, ``environment X``, ``file PATH`` or ``flag``.

        Args:
            config_file: YAML file; by default what ``KVQUILT_CONFIG`` names, if anything.
            flags: values the caller gave; ``None`` stands for "not given".

        Raises:
            ConfigError: an unknown name, with the nearest valid one; or an invalid value, with field, source and rule.
        """
        values: dict[str, Any] = {}
        sources: Sources = dict.fromkeys(cls.model_fields, "default")
        environment = _environment(frozenset(cls.model_fields))
        from_environment = environment.pop("config", None)
        named = config_file or from_environment
        layers = [(f"environment {_PREFIX}{{}}", environment)]
        if named is not None:
            try:
                path = _expanded(Path(named))
            except ValueError as error:
                raise ConfigError("config", str(error), str(named)) from None
            layers.append((f"file {path}", _read_yaml(path)))
        layers.append(("flag", {k: v for k, v in (flags or {}).items() if v is not None}))
        for label, layer in layers:
            for name, value in layer.items():
                if name not in sources:
                    raise ConfigError(f"{name} ({label})", f"no such setting{nearest(name, cls.model_fields)}")
                values[name], sources[name] = value, label.format(name.upper())
        try:
            return cls(**values), sources
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            got = None if name in _SECRET else first["input"]
            raise ConfigError(f"{name} ({sources[name]})", first["msg"].removeprefix("Value error, "), got) from None

    @property
    def remote_place(self) -> Remote | None:
        """`remote` with its password, as `Store.open` takes it."""
        if self.remote is None or self.remote_password is None:
            return self.remote
        return self.remote.with_password(self.remote_password.get_secret_value())


def _environment(known: frozenset[str]) -> dict[str, Any]:
    """The ``KVQUILT_*`` variables that are set and not empty, by field name."""
    found = {}
    for variable, value in os.environ.items():
        name = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or not value:
            continue
        if name not in known and name != "config":
            hint = nearest(variable, [_PREFIX + field.upper() for field in (*known, "config")])
            raise ConfigError(variable, f"no such setting{hint}")
        found[name] = value
    return found


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", f"the file cannot be read: {error.strerror}", str(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where else ""
        raise ConfigError("config", f"the file is not valid YAML{line}", str(path)) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError("config", "the file must hold `name: value` lines", str(path))
    return content
