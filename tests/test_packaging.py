import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import kvquilt

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = {
    "Answer",
    "Document",
    "Engine",
    "Inline",
    "KvquiltError",
    "Ledger",
    "Prompt",
    "Question",
    "Store",
    "Stream",
    "__version__",
    "load_model",
}


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(kvquilt.__all__) == PUBLIC == set(dir(kvquilt))
    for name in PUBLIC - {"__version__"}:
        assert getattr(kvquilt, name).__doc__, name
    with pytest.raises(AttributeError, match="Enigne"):
        kvquilt.Enigne  # noqa: B018


def test_type_checkers_see_the_homes_that_are_loaded() -> None:
    tree = ast.parse(Path(kvquilt.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == kvquilt._HOMES


def test_import_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'pydantic', 'typer', 'rich'}"
    code = f"import sys, kvquilt; kvquilt.KvquiltError; kvquilt.__version__; print({heavy} & {{*sys.modules}} or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_version_and_licence_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert kvquilt.__version__ == project["version"]
    assert metadata("kvquilt")["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def test_every_dependency_is_pinned_explained_and_uncapped() -> None:
    required = requires("kvquilt") or []
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    explained = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").lower()
    assert _names(required) <= _names([pin for pin in pins if not pin.startswith("#")])
    assert all("==" in pin and "+" not in pin for pin in pins if not pin.startswith("#"))
    assert not [requirement for requirement in required if "<" in requirement.split(";")[0]]
    for name in _names(required):
        assert f"| {name} |" in explained, name


def test_the_wheel_holds_every_module_and_the_type_marker() -> None:
    shipped = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    sources = {path for suffix in ("py", "css", "js", "html", "svg") for path in (ROOT / "src").rglob(f"*.{suffix}")}
    assert shipped == {str(path.relative_to(ROOT / "src")) for path in sources} | {"kvquilt/py.typed"}
