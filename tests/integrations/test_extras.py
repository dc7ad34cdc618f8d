"""Where an adapter's framework is missing, what to install is said."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import kvquilt.integrations

ROOT = Path(__file__).parents[2]
MODULES = {"haystack-ai": "haystack", "llama-index-core": "llama_index.core"}  # where they are not called alike
ADAPTERS = [
    path.stem
    for path in sorted(Path(kvquilt.integrations.__file__).parent.glob("*.py"))
    if path.stem not in ("__init__", "extra", "parts")
]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_missing_package_names_the_adapters_own_extra(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = adapter.replace("_", "-")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for package in (re.split(r"[>=]", each)[0] for each in extras[extra]):
        module = MODULES.get(package, package.replace("-", "_"))
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            patched.delitem(sys.modules, f"kvquilt.integrations.{adapter}", raising=False)
            with pytest.raises(ModuleNotFoundError, match=rf"{module}.* is missing: pip install 'kvquilt\[{extra}\]'"):
                importlib.import_module(f"kvquilt.integrations.{adapter}")


def test_every_adapter_is_tried() -> None:
    assert ADAPTERS == ["haystack", "langchain", "llama_index"]
