"""`kvquilt explain`: the account of the last answer."""

from __future__ import annotations

import json

import typer

from kvquilt.cli.ask import LAST_ANSWER
from kvquilt.cli.common import Json, echo_json, settings_of, width
from kvquilt.errors import InputError


def explain(context: typer.Context, json_output: Json = False) -> None:
    """Show what the last `kvquilt ask` reused, what it computed, and why."""
    from rich.errors import NotRenderableError

    from kvquilt.ledger import Ledger

    settings, _ = settings_of(context)
    path = settings.cache_dir / LAST_ANSWER
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        table = Ledger.from_dict(kept["ledger"]).table(width())
    except FileNotFoundError:
        raise InputError("explain", "there is no answer yet; `kvquilt ask` leaves one", str(path)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NotRenderableError):
        raise InputError("explain", "the account of the last answer cannot be read; ask again", str(path)) from None
    if json_output:
        echo_json(kept)
    else:
        typer.echo(table)
