"""The program: its verbs, its exit codes, and its error output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kamera.cli.lazy import Verb, group
from kamera.errors import KameraError, PlanError

STORE = {
    "ls": Verb("kamera.cli.store:ls"),
    "stats": Verb("kamera.cli.store:stats"),
    "verify": Verb("kamera.cli.store:verify"),
    "gc": Verb("kamera.cli.store_keep:gc"),
    "pin": Verb("kamera.cli.store_keep:pin"),
    "unpin": Verb("kamera.cli.store_keep:unpin"),
    "forget": Verb("kamera.cli.store_keep:forget"),
    "export": Verb("kamera.cli.store_copy:export"),
    "import": Verb("kamera.cli.store_copy:import_store"),
    "convert": Verb("kamera.cli.store_copy:convert"),
    "quarantine": Verb(
        "kamera.cli.store_quarantine:quarantine",
        "Damaged copies in quarantine; never served, deleted only on demand.",
    ),
}
EVAL = {
    "mm-niah": Verb("kamera.cli.eval_tasks:mm_niah"),
    "milebench": Verb("kamera.cli.eval_tasks:milebench"),
    "muirbench": Verb("kamera.cli.eval_tasks:muirbench"),
    "video-mme": Verb("kamera.cli.eval_tasks:video_mme"),
    "egoschema": Verb("kamera.cli.eval_tasks:egoschema"),
    "reuse": Verb("kamera.cli.eval_tasks:reuse"),
    "freeze": Verb("kamera.cli.eval_freeze:freeze"),
    "merge": Verb("kamera.cli.eval_tasks:merge"),
}
store = typer.Typer(help="A store's contents and its upkeep.", cls=group(STORE), no_args_is_help=True)
evaluate = typer.Typer(
    help="Measure the loss of reuse and the share a patch restores.", cls=group(EVAL), no_args_is_help=True
)
VERBS = {
    "demo": Verb("kamera.cli.demo:demo"),
    "doctor": Verb("kamera.cli.doctor:doctor"),
    "certify": Verb("kamera.cli.certify:certify"),
    "compile": Verb("kamera.cli.compile:compile_plan"),
    "plan": Verb("kamera.cli.plan:plan_from_trace"),
    "view": Verb("kamera.cli.view:view"),
    "serve": Verb("kamera.cli.serve:serve"),
    "inspect": Verb("kamera.cli.inspect:inspect"),
    "store": Verb("kamera.cli.app:store", "A store's contents and its upkeep."),
    "eval": Verb("kamera.cli.app:evaluate", "Measure the loss of reuse and the share a patch restores."),
}
app = typer.Typer(
    name="kamera",
    cls=group(VERBS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    """Run a command line of ``kamera`` (default: the process's own) and return its exit code (`run`)."""
    return run(app, "kamera", arguments)


def run(program: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a program's command line (default: the process's own) and return its exit code.

    0 done, 1 failed (a KameraError or the operating system), 2 bad usage (a ValueError is the caller's
    mistake by house rule). Errors go to stderr, one line each.
    """
    try:
        program(None if arguments is None else list(arguments), prog_name=name)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except PlanError as error:
        return _fail(2, *error.problems)
    except (KameraError, OSError) as error:
        return _fail(1, str(error))
    except ValueError as error:
        return _fail(2, str(error))
    return 0


def _fail(code: int, *messages: str) -> int:
    for message in messages:
        print("error:", " ".join(message.split()), file=sys.stderr)
    return code
