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
from kamera.store.directory import Quarantined

QUARANTINE = {name: Verb(f"kamera.cli.store_quarantine:{name}") for name in ("ls", "drop")}
quarantine = typer.Typer(cls=group(QUARANTINE), no_args_is_help=True)


@command
def ls(target: StoreArgument) -> None:
    """List the copies."""
    with target.open() as store:
        copies = StoreAdmin(store).quarantined()
    target.out.show(_document(store, copies, 0))


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
        admin = StoreAdmin(store)
        files = list(names)
        if older is not None:
            files += [copy.file for copy in admin.quarantined() if copy.when < time.time() - older]
        count = sum(map(admin.drop_quarantined, dict.fromkeys(files)))
        copies = admin.quarantined()
    target.out.show(_document(store, copies, count))


def _document(store: ChunkStore, copies: list[Quarantined], count: int) -> dict[str, Any]:
    return {"store": store.url, "dropped": count, "copies": [asdict(copy) for copy in copies]}
