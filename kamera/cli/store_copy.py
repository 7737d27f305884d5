"""``kamera store export``, ``import`` and ``convert``: objects in another store."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.output import Output
from kamera.cli.place import Coded, store_url
from kamera.cli.store_options import StoreArgument
from kamera.store import ChunkStore, Copied, StoreAdmin

FLUSH_SECONDS = 60
"""Seconds a remote may take to store what was written."""


@command
def export(
    target: StoreArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, help="The store to write.")],
    chunk: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this chunk; may be given several times.")
    ] = None,
) -> None:
    """Copy a store's objects into a plain store in a directory. Exit code 1 if some could not be read."""
    with target.open() as store, target.out.progress_callback("object") as progress:
        report = StoreAdmin(store).copy(directory, chunk, progress=progress)
    _show(target.out, report, path=str(directory))


@command
def import_store(
    target: StoreArgument,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A plain store.")
    ],
) -> None:
    """Copy a plain store into another one, created if missing. Exit code 1 if some of it was refused."""
    with ChunkStore.open(directory, read_only=True) as source, target.open(make=True) as store:
        with target.out.progress_callback("object") as progress:
            report = StoreAdmin(source).copy(store, progress=progress)
        _show(target.out, report, path=str(directory), unsaved=len(store.flush(FLUSH_SECONDS).unsaved))


@command
def convert(
    source: StoreArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", callback=store_url, help="The store to write to; created if missing."
        ),
    ],
    kv: Coded = "int8",
) -> None:
    """Write a store's canonicals in codes of 8 or 4 bits into another store of the same tenant and secret.

    The source does not change. Patches are not converted: compile them again for the codes. Exit code 1 if a
    canonical was refused.
    """
    other = replace(source, store=target, cache=None)
    with source.open() as store, other.open(make=True) as target_store:
        with source.out.progress_callback("object") as progress:
            report = StoreAdmin(store).copy(target_store, kv=kv, progress=progress)
        unsaved = len(target_store.flush(FLUSH_SECONDS).unsaved)
        _show(source.out, report, store=store.url, target=target_store.url, kv=kv, unsaved=unsaved)


def _show(out: Output, report: Copied, *, unsaved: int = 0, **about: str) -> None:
    """Show a copy. Exit code 1 if some of it was refused, or has not reached the remote."""
    out.show({**about, "unsaved": unsaved, **asdict(report)})
    if report.refused or unsaved:
        raise typer.Exit(1)
