"""The program: its verbs, its exit codes, and its error output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kamera.cli.lazy import Verb, group
from kamera.errors import KameraError, PlanError

STORE = {
    "ls": Verb("kamera.cli.store:ls", "List a store's objects, oldest first."),
    "stats": Verb(
        "kamera.cli.store:stats",
        "Count a store's objects, bytes, chunks and contexts, its pins and its damaged copies.",
    ),
    "verify": Verb(
        "kamera.cli.store:verify",
        "Read every byte of every object; damaged ones go to quarantine, index and files agree afterwards.",
    ),
    "gc": Verb(
        "kamera.cli.store_keep:gc",
        "Remove objects that save the least recompute per byte until the rest fits; pinned ones stay.",
    ),
    "pin": Verb(
        "kamera.cli.store_keep:pin",
        "Keep objects through gc, and show the pins. Without OBJECT only show them.",
    ),
    "unpin": Verb(
        "kamera.cli.store_keep:unpin",
        "Let gc remove objects again. Exit code 0 also if they were not pinned.",
    ),
    "forget": Verb(
        "kamera.cli.store_keep:forget",
        "Remove everything derived from a chunk, check again, and report any remains.",
    ),
    "export": Verb(
        "kamera.cli.store_bundle:export_bundle",
        "Write a store's objects to one file, unencrypted. Exit code 1 if some could not be read.",
    ),
    "import": Verb(
        "kamera.cli.store_bundle:import_bundle",
        "Import a bundle into a store, created if missing. Exit code 1 if some of it was refused.",
    ),
    "rotate": Verb(
        "kamera.cli.store_rotate:rotate",
        "Re-encrypt every object of a tenant under the first key; the others only decrypt.",
    ),
    "convert": Verb(
        "kamera.cli.store_convert:convert",
        "Write a store's canonicals in codes of 8 or 4 bits into another store of the same tenant and "
        "secret.",
    ),
    "quarantine": Verb(
        "kamera.cli.store_quarantine:quarantine",
        "Damaged copies in quarantine; never served, deleted only on demand.",
    ),
}
EVAL = {
    "fidelity": Verb(
        "kamera.cli.eval:fidelity",
        "Re-prefill, blind reuse, patch and stale patch after recall, reorder and turnover.",
    ),
    "mm-niah": Verb(
        "kamera.cli.eval_tasks:mm_niah",
        "MM-NIAH: needles in long documents of text and images.",
    ),
    "milebench": Verb(
        "kamera.cli.eval_tasks:milebench",
        "MileBench: long contexts of many images. A subtask is a dataset or a code such as T-1.",
    ),
    "muirbench": Verb("kamera.cli.eval_tasks:muirbench", "MuirBench: multiple choice over several images."),
    "merge": Verb(
        "kamera.cli.eval_tasks:merge",
        "Join runs of one benchmark (shards, other samples, other arms) into one, without model or data.",
    ),
    "video-mme": Verb(
        "kamera.cli.eval_tasks:video_mme",
        "Video-MME: multiple choice over videos, without and with subtitles.",
    ),
    "egoschema": Verb(
        "kamera.cli.eval_tasks:egoschema",
        "EgoSchema: multiple choice over three-minute videos.",
    ),
    "reuse": Verb(
        "kamera.cli.eval_reuse:reuse",
        "The frozen benchmark of reuse: windows over time, and what each way of keeping them costs.",
    ),
}
store = typer.Typer(help="A store's contents and its upkeep.", cls=group(STORE), no_args_is_help=True)
evaluate = typer.Typer(
    help="Measure the loss of reuse and the share a patch restores.", cls=group(EVAL), no_args_is_help=True
)
VERBS = {
    "demo": Verb(
        "kamera.cli.demo:demo",
        "Film a small world, slide, recall and reorder, and compare with re-prefill and blind reuse.",
    ),
    "doctor": Verb(
        "kamera.cli.doctor:doctor",
        "Probe a model, prove relocation and patching on it, and report supported or refused.",
    ),
    "certify": Verb(
        "kamera.cli.certify:certify",
        "Ask a multi-hop probe of reused and of re-prefilled windows, and write a certificate.",
    ),
    "compile": Verb(
        "kamera.cli.compile:compile_plan",
        "Form and store canonicals and patches for every chunk of every window of a plan.",
    ),
    "plan": Verb(
        "kamera.cli.plan:plan_from_trace",
        "Make a plan of the recurring windows, the largest savings first.",
    ),
    "view": Verb(
        "kamera.cli.view:view",
        "Show a window's life: every chunk over time, what ran, and what a prefix cache would have run.",
    ),
    "serve": Verb(
        "kamera.cli.serve:serve",
        "Serve /v1/chat/completions, /v1/responses and /v1/messages; an agent changes its URL only.",
    ),
    "inspect": Verb(
        "kamera.cli.inspect:inspect",
        "Show the contents and verify every byte. Changes nothing.",
    ),
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
