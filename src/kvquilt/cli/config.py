"""`kvquilt config`: what is in force, and where each value comes from."""

from __future__ import annotations

import typer

from kvquilt.cli.common import Json, echo_json, echo_table, settings_of

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Settings in force.")


@app.callback()
def group() -> None:
    """Settings in force."""


@app.command()
def show(context: typer.Context, json_output: Json = False) -> None:
    """Print every setting, its value and its source.

    Lowest to highest: default, environment KVQUILT_*, the file of --config or KVQUILT_CONFIG, flags.
    """
    settings, sources = settings_of(context)
    values = settings.model_dump(mode="json")
    if json_output:
        echo_json({name: {"value": values[name], "source": source} for name, source in sources.items()})
        return
    rows = [(name, "-" if values[name] is None else str(values[name]), source) for name, source in sources.items()]
    echo_table(("setting", "value", "source"), rows)
