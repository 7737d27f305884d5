"""The program: its verbs, its exit codes, and how errors are shown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kamera.cli.bench import bench
from kamera.cli.certify import certify
from kamera.cli.compile import compile_plan
from kamera.cli.demo import demo
from kamera.cli.doctor import doctor
from kamera.cli.eval import evaluate
from kamera.cli.eval_paper import paper
from kamera.cli.eval_tasks import add_benchmarks
from kamera.cli.inspect import inspect
from kamera.cli.plan import plan_from_trace
from kamera.cli.store import store
from kamera.cli.store_bundle import export_bundle, import_bundle
from kamera.cli.store_convert import convert
from kamera.cli.store_keep import forget, gc, pin, unpin
from kamera.cli.store_quarantine import quarantine
from kamera.cli.store_rotate import rotate
from kamera.compile import PlanError
from kamera.errors import KameraError

app = typer.Typer(
    name="kamera",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help speaks of [lists] and {objects}
)
app.command("demo")(demo)
app.command("doctor")(doctor)
app.command("certify")(certify)
app.command("bench")(bench)
app.command("compile")(compile_plan)
app.command("plan")(plan_from_trace)
app.command("inspect")(inspect)
store.command("gc")(gc)
store.command("pin")(pin)
store.command("unpin")(unpin)
store.add_typer(quarantine, name="quarantine")
store.command("forget")(forget)
store.command("export")(export_bundle)
store.command("import")(import_bundle)
store.command("rotate")(rotate)
store.command("convert")(convert)
app.add_typer(store, name="store")
add_benchmarks(evaluate)
evaluate.command("paper")(paper)
app.add_typer(evaluate, name="eval")


def _print_version(wanted: bool) -> None:
    if wanted:
        from kamera import __version__

        typer.echo(f"kamera {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Position-free KV cache: an agent's context window as a deque."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code.

    0 done, 1 failed (a KameraError or the operating system), 2 bad usage (a ValueError is a caller's
    mistake by house rule). A failure is told on stderr, in one line for each thing that is wrong.
    """
    try:
        app(None if arguments is None else list(arguments), prog_name="kamera")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except PlanError as error:
        return _failed(2, *error.problems)
    except KameraError as error:
        return _failed(1, str(error))
    except OSError as error:
        return _failed(1, str(error))
    except ValueError as error:
        return _failed(2, str(error))
    return 0


def _failed(code: int, *messages: str) -> int:
    for message in messages:
        print("error:", " ".join(message.split()), file=sys.stderr)
    return code
