"""``kamera store quarantine``: damaged copies of objects."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kamera.cli.command import command
from kamera.cli.lazy import Verb, group
from kamera.cli.store_options import Older, StoreArgument
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.info import Quarantined

QUARANTINE = {name: Verb(f"kamera.cli.store_quarantine:{name}") for name in ("ls", "show", "release", "drop")}
quarantine = typer.Typer(
    help="Damaged copies in quarantine; never served, deleted only on demand.",
    cls=group(QUARANTINE),
    no_args_is_help=True,
)

Copies = Annotated[list[str], typer.Argument(metavar="COPY…", help="Copies, by their file in `ls`.")]


@command
def ls(target: StoreArgument) -> None:
    """List the copies; `show` tells what is wrong with one."""
    with target.open() as store:
        copies = StoreAdmin(store).quarantine.copies()
    target.out.show(_document(store, copies, 0))


@command
def show(
    target: StoreArgument,
    copy: Annotated[str, typer.Argument(metavar="COPY", help="The copy, by its file in `ls`.")],
) -> None:
    """Read every byte of a copy again and report its contents and its state.

    Changes nothing. Exit code 1 if it is damaged.
    """
    with target.open() as store:
        judged = StoreAdmin(store).quarantine.judge(copy)
    target.out.show({"store": store.url, **asdict(judged)})
    if not judged.sound:
        raise typer.Exit(1)


@command
def release(target: StoreArgument, copies: Copies) -> None:
    """Return sound copies to the store, unless it has the object again. The others stay, with a reason.

    Exit code 1 if one stays.
    """
    with target.open() as store:
        judged = [StoreAdmin(store).quarantine.release(copy) for copy in copies]
    target.out.show({"store": store.url, "copies": [asdict(j) for j in judged]})
    if not all(j.released for j in judged):
        raise typer.Exit(1)


@command
def drop(
    target: StoreArgument,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME…", help="Copies by their file, or objects for all of theirs.")
    ] = [],  # noqa: B006 (never modified)
    older: Older = None,
) -> None:
    """Delete copies permanently, by name or by age."""
    if not names and older is None:
        raise ValueError("nothing to delete: give names, or --older TIME")
    with target.open() as store:
        quarantined = StoreAdmin(store).quarantine
        wanted = list(names)
        if older is not None:
            wanted += [copy.file for copy in quarantined.copies() if copy.when < time.time() - older]
        count = sum(quarantined.drop(name) for name in dict.fromkeys(wanted))
        copies = quarantined.copies()
    target.out.show(_document(store, copies, count))


def _document(store: ChunkStore, copies: list[Quarantined], dropped: int) -> dict[str, Any]:
    return {"store": store.url, "dropped": dropped, "copies": [asdict(copy) for copy in copies]}
