"""`kvquilt study`: why reuse pays, what it does to attention, what it damages and what mends that."""

from __future__ import annotations

import typer

from kvquilt.cli.study_attention import attention
from kvquilt.cli.study_hit_rate import hit_rate
from kvquilt.cli.study_repair_budget import repair_budget

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Why reuse pays, and what it does.")


@app.callback()
def group() -> None:
    """Why reuse pays, what it does to attention, what it damages and what mends it."""


app.command("hit-rate")(hit_rate)
app.command("attention")(attention)
app.command("repair-budget")(repair_budget)
