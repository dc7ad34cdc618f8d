"""`kvquilt models`: what is here, what can be reused, and fetching the default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvquilt.cli.common import Device, Dtype, ExitCode, Json, echo_json, echo_table, settings_of
from kvquilt.cli.work import quiet_libraries
from kvquilt.errors import InputError, UnsupportedModelError, nearest

if TYPE_CHECKING:
    from kvquilt.config import Settings

EMBEDDED = "smollm2"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Models on this machine and what they allow.")


@app.command()
def check(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, .gguf file or smollm2.")],
    dtype: Dtype = None,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Load MODEL and print what of its cache can be reused; exit code 3 and the reason if nothing can."""
    settings, _ = settings_of(context, model=model, dtype=dtype, device=device)
    quiet_libraries()
    from kvquilt.model.load import load_model

    row: dict[str, Any] = {"model": settings.model}
    try:
        loaded = load_model(settings.model, settings.dtype, settings.device, settings=settings)
        row |= loaded.capability.as_row()
    except UnsupportedModelError as error:
        row |= {"reusable": False, "reason": str(error)}
    if json_output:
        echo_json(row)
    else:
        echo_table(("property", "value"), [(name, _plain(value)) for name, value in row.items()])
    if not row["reusable"]:
        raise typer.Exit(ExitCode.MODEL)


@app.command("list")
def list_models(context: typer.Context, json_output: Json = False) -> None:
    """List the models that load without a network: the default one, those of models_dir, the Hugging Face cache."""
    settings, _ = settings_of(context)
    rows = list(_found(settings))
    if json_output:
        echo_json([dict(zip(("model", "kind", "where"), row, strict=True)) for row in rows])
    else:
        echo_table(("model", "kind", "where"), rows)


@app.command()
def fetch(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2, the embedded default.")] = EMBEDDED,
    dtype: Dtype = None,
    json_output: Json = False,
) -> None:
    """Fetch the default model and unpack it once into the cache directory."""
    settings, _ = settings_of(context, dtype=dtype)
    if name != EMBEDDED:
        hint = nearest(name, [EMBEDDED])
        raise InputError("NAME", f"only the embedded model is fetched here{hint}; others load by id or path", name)
    quiet_libraries()
    from kvquilt.model.gguf import smollm2_folder
    from kvquilt.model.load import gguf_dtype

    folder = smollm2_folder(settings.cache_dir, settings.dtype or gguf_dtype())
    if json_output:
        echo_json({"model": EMBEDDED, "folder": str(folder)})
    else:
        typer.echo(f"{EMBEDDED}: {folder}")


def _found(settings: Settings) -> Iterator[tuple[str, str, str]]:
    from kvquilt.model.gguf import SMOLLM2_FILE

    copies = sorted((settings.cache_dir / "models").glob(f"{Path(SMOLLM2_FILE).stem}-*/manifest.json"))
    yield EMBEDDED, "embedded", str(copies[0].parent) if copies else "kvquilt models fetch smollm2"
    if settings.models_dir is not None:
        for path in sorted(settings.models_dir.glob("*")):
            if path.suffix == ".gguf" or (path / "config.json").is_file():
                yield path.name, "GGUF" if path.suffix == ".gguf" else "folder", str(path)
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type == "model":
            yield repository.repo_id, "Hugging Face", str(repository.repo_path)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
