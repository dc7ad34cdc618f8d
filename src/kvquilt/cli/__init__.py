"""The command line: `main` is what the `kvquilt` script calls; one file per verb."""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process; ends it with the exit code (see `kvquilt --help`)."""
    from kvquilt.cli.app import app

    app(prog_name="kvquilt")
