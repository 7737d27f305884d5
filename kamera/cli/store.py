"""``kamera store ls``, ``stats`` and ``verify``: a store's contents and their integrity."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.store_options import Kind, StoreArgument
from kamera.store import StoreAdmin


@command
def ls(
    target: StoreArgument,
    kind: Kind = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The newest N only.")] = None,
) -> None:
    """List a store's objects, oldest first."""
    with target.open() as store:
        count = sum(tally["objects"] for tally in StoreAdmin(store).census(kind).kinds.values())
        rows = store.ls(kind, offset=0 if limit is None else max(0, count - limit))
    document = {"store": store.url, "objects": count, "listed": [asdict(info) for info in rows]}
    names = "key kind context.kv chunk_id tokens rank formed antecedents bytes created"
    target.out.show(document, {"listed": names.split()})


@command
def stats(target: StoreArgument, kind: Kind = None) -> None:
    """Count a store's objects, bytes, chunks and contexts, its pins and its damaged copies."""
    with target.open() as store:
        admin = StoreAdmin(store)
        census = admin.census(kind)
        pins, cap = admin.pins.list(), admin.pins.cap
        copies = admin.quarantined()
        remote = admin.stats().remote
    document = {
        "store": store.url,
        "objects": sum(tally["objects"] for tally in census.kinds.values()),
        "bytes": sum(tally["bytes"] for tally in census.kinds.values()),
        **asdict(census),
        "pinned": {"objects": len(pins), "bytes": sum(pin.bytes for pin in pins), "cap": cap},
        "quarantined": {"copies": len(copies), "bytes": sum(copy.bytes for copy in copies)},
    }
    if remote is not None:
        document["remote"] = {"url": remote.url, "pending": remote.pending}
    target.out.show(document)


@command
def verify(target: StoreArgument) -> None:
    """Read every byte of every object; damaged ones go to quarantine, and the index is made anew.

    Exit code 1 if an object was damaged or cannot be read.
    """
    with target.open() as store, target.out.progress_callback("object") as progress:
        report = StoreAdmin(store).verify(progress=progress)
    target.out.show({"store": store.url, **asdict(report)})
    if report.quarantined or report.refused:
        raise typer.Exit(1)
