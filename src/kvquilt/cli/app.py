"""The verbs put together, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvquilt.cli import (
    ask,
    bench,
    compile,
    config,
    demo,
    doctor,
    eval,
    explain,
    keys,
    methods,
    models,
    report,
    serve,
    store,
    study,
    train,
    tune,
    writers,
)
from kvquilt.cli.common import CONFIG, FLAGS, ExitCode, echo_json, wants_json, warn
from kvquilt.errors import InputError, KvquiltError, ModelError, StoreError

EPILOG = (
    "Exit codes: 0 ok; 1 unexpected failure; 2 usage or input error; 3 model missing, unsupported or without finite "
    "output; 4 store unavailable or damaged; 5 expected reuse did not happen; 6 the gate failed; 130 interrupted."
)


def exit_code(error: KvquiltError) -> ExitCode:
    """The code that belongs to a deliberate failure."""
    for kind, code in ((InputError, ExitCode.USAGE), (ModelError, ExitCode.MODEL), (StoreError, ExitCode.STORE)):
        if isinstance(error, kind):
            return code
    return ExitCode.USAGE


class Remarks(logging.Handler):
    """The library's log as remarks on stderr, but for what stands in the ledger that the verb shows."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "in_ledger", False):
            return
        warn(f"{record.levelname.lower()}: {record.getMessage()}")


class Verbs(TyperGroup):
    """Turns `KvquiltError` and Ctrl-C into one line on stderr (and JSON on stdout where asked) and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvquiltError as error:
            if wants_json(ctx):
                named = {k: getattr(error, k) for k in ("field", "rule") if hasattr(error, k)}
                echo_json({"error": {"type": type(error).__name__, "message": str(error), **named}})
            warn(f"error: {' '.join(str(error).split())}")
            ctx.exit(int(exit_code(error)))
        except KeyboardInterrupt:
            warn("interrupted")
            ctx.exit(int(ExitCode.INTERRUPTED))


app = typer.Typer(
    name="kvquilt",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: quick, and the same in the docs
    pretty_exceptions_enable=False,  # a rich traceback may show local variables, and with them document text
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)


def _version(wanted: bool) -> None:
    if wanted:
        from kvquilt import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML file with settings.")
    ] = None,
    store_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where compiled segments are kept.")] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Compile each document's KV cache once; reuse it in any prompt and any order; say what was reused."""
    log = logging.getLogger("kvquilt")
    if not any(isinstance(handler, Remarks) for handler in log.handlers):
        log.addHandler(Remarks(logging.WARNING))
    context.meta[CONFIG] = config_file
    context.meta[FLAGS] = {"store_dir": store_dir}


app.command("compile")(compile.compile_documents)
app.command("ask")(ask.ask)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.command("train")(train.train)
app.command("tune")(tune.tune)
app.command("eval")(eval.evaluate)
app.command("report")(report.report)
app.command("methods")(methods.methods)
app.command("serve")(serve.serve)
app.add_typer(keys.app, name="keys")
app.add_typer(store.app, name="store")
app.add_typer(models.app, name="models")
app.add_typer(writers.app, name="writers")
app.add_typer(bench.app, name="bench")
app.add_typer(study.app, name="study")
app.command("demo")(demo.demo)
app.add_typer(config.app, name="config")
