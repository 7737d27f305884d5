"""The program: its verbs, its exit codes, and its error output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kamera.cli.lazy import Verb, group
from kamera.errors import KameraError, PlanError

_UsageError: type[Any] = typer.BadParameter.__mro__[1]
"""What typer raises for any bad command line; it exports only this subclass."""


def _verbs(module: str, *names: str) -> dict[str, Verb]:
    """The commands of a module, each a function of its name."""
    return {name: Verb(f"{module}:{name.replace('-', '_')}") for name in names}


STORE = {
    **_verbs("kamera.cli.store", "ls", "stats", "verify"),
    **_verbs("kamera.cli.store_keep", "gc", "pin", "unpin", "forget"),
    **_verbs("kamera.cli.store_copy", "export"),
    "import": Verb("kamera.cli.store_copy:import_store"),
    **_verbs("kamera.cli.store_copy", "convert"),
    "quarantine": Verb(
        "kamera.cli.store_quarantine:quarantine",
        "Damaged copies in quarantine; never served, deleted only on demand.",
    ),
}
EVAL = {
    **_verbs("kamera.cli.eval_tasks", "mm-niah", "milebench", "muirbench", "video-mme", "egoschema", "reuse"),
    **_verbs("kamera.cli.eval_freeze", "freeze"),
    **_verbs("kamera.cli.eval_tasks", "merge"),
}
ANALYZE = _verbs("kamera.cli.analyze", "recovery", "shift", "roc", "sink", "breakeven")
store = typer.Typer(cls=group(STORE), no_args_is_help=True)
evaluate = typer.Typer(cls=group(EVAL), no_args_is_help=True)
analyze = typer.Typer(cls=group(ANALYZE), no_args_is_help=True)
VERBS = {
    "demo": Verb("kamera.cli.demo:demo"),
    "try": Verb("kamera.cli.try_pictures:try_pictures"),
    "doctor": Verb("kamera.cli.doctor:doctor"),
    "certify": Verb("kamera.cli.certify:certify"),
    "compile": Verb("kamera.cli.compile:compile_plan"),
    "plan": Verb("kamera.cli.plan:plan_from_trace"),
    "view": Verb("kamera.cli.view:view"),
    "serve": Verb("kamera.cli.serve:serve"),
    "inspect": Verb("kamera.cli.inspect:inspect"),
    "store": Verb("kamera.cli.app:store", "A store's contents and its upkeep."),
    "analyze": Verb(
        "kamera.cli.app:analyze", "What reuse can gain on a workload, and what a model's KV permits."
    ),
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


def _print_version(flag: bool) -> None:
    if flag:
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
    mistake by house rule), 130 interrupted. Errors go to stderr, one line each.
    """
    try:
        code = program(None if arguments is None else list(arguments), prog_name=name, standalone_mode=False)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except _UsageError as error:
        return _refuse_usage(error)
    except PlanError as error:
        return _fail(2, *error.problems)
    except (KameraError, OSError) as error:
        return _fail(1, str(error))
    except ValueError as error:
        return _fail(2, str(error))
    return code if isinstance(code, int) else 0


def _refuse_usage(error: Any) -> int:
    """Say what is wrong with a command line. A group without a command shows its help."""
    message = error.format_message().replace("Value error, ", "").strip().removesuffix(".")
    if error.ctx is None:
        return _fail(2, message)
    path = error.ctx.command_path
    if message == error.ctx.get_help().strip().removesuffix("."):
        print(message, file=sys.stderr)
        return 2
    return _fail(2, f"{path}: {message[:1].lower()}{message[1:]}; see {path} --help")


def _fail(code: int, *messages: str) -> int:
    for message in messages:
        print("error:", " ".join(message.split()), file=sys.stderr)
    return code
