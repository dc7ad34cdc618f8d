"""The import graph: who may know transformers, who may know the engine, and that there is no cycle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import kvquilt

SOURCE = Path(kvquilt.__file__).parent
MODULES = {
    "kvquilt." + ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
    if path != SOURCE / "__init__.py"  # its names are loaded on first use
}
# Outside model/, each for a reason of its own.
KNOW_TRANSFORMERS = {
    "kvquilt.bench": "measures plain transformers beside kvquilt",
    "kvquilt.cli.models": "lists the Hugging Face cache",
    "kvquilt.cli.work": "silences the progress bars of other libraries",
}
ABOVE_ENGINE = ("kvquilt.bench", "kvquilt.cli", "kvquilt.server")


def imported(tree: ast.AST, deep: bool) -> Iterator[str]:
    """Full names that are imported when the module runs (`deep`: also when its functions do), types left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif deep or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported(node, deep)


def imports(module: str, deep: bool = True) -> set[str]:
    return set(imported(ast.parse(MODULES[module].read_text(encoding="utf-8")), deep))


def test_only_the_model_folder_knows_transformers() -> None:
    knows = {m for m in MODULES if {n.partition(".")[0] for n in imports(m)} & {"transformers", "huggingface_hub"}}
    assert {m for m in knows if not m.startswith("kvquilt.model.")} <= set(KNOW_TRANSFORMERS)
    assert "kvquilt.model.slots" in knows, "nothing was found, so nothing was tested"


def test_nothing_below_the_engine_imports_it() -> None:
    names = ("kvquilt.engine", "kvquilt.Engine")
    users = {m for m in MODULES if any(n.startswith(names) for n in imports(m))}
    assert {m for m in users if not m.startswith(ABOVE_ENGINE)} == set()
    assert "kvquilt.bench" in users, "nothing was found, so nothing was tested"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        names = imports(module, deep=False)
        graph[module] = {n if n in MODULES else n.rpartition(".")[0] for n in names} & set(MODULES) - {module}
    assert list(TopologicalSorter(graph).static_order())
