"""``kamera store ls``, ``stats`` and ``verify``: a store's contents and their integrity."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.output import facts, listing, size
from kamera.cli.store_options import Kind, StoreArgument, moment
from kamera.errors import StoreError
from kamera.store import StoreAdmin


@command
def ls(
    target: StoreArgument,
    kind: Kind = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The newest N only.")] = None,
) -> None:
    """List a store's objects, oldest first."""
    with target.opened() as store:
        count = sum(counted.objects for counted in StoreAdmin(store).census(kind).kinds.values())
        shown = store.ls(kind, offset=0 if limit is None else max(0, count - limit))
    rows = [
        (
            i.key[:12],
            i.kind,
            i.context.kv,
            i.chunk_id[:12],
            i.tokens,
            i.rank,
            i.formed or "",
            " ".join(a[:8] for a in i.antecedents),
            i.bytes,
            moment(i.created),
        )
        for i in shown
    ]
    columns = ("key", "kind", "kv", "chunk", "tokens", "rank", "formed", "antecedents", "bytes", "created")
    title = f"{store.url}: {count} objects" + (f", the newest {len(shown)}" if len(shown) < count else "")
    document = {"store": store.url, "objects": count, "listed": [asdict(i) for i in shown]}
    target.out.write(document, [listing(title, columns, rows)])


@command
def stats(target: StoreArgument, kind: Kind = None) -> None:
    """Count a store's objects, bytes, chunks and contexts, its pins and its damaged copies."""
    with target.opened() as store:
        admin = StoreAdmin(store)
        census = admin.census(kind)
        pins, cap = admin.pins.list(), admin.pins.cap
        damaged = admin.quarantine.copies()
        remote = admin.stats().remote
    objects = sum(counted.objects for counted in census.kinds.values())
    total = sum(counted.bytes for counted in census.kinds.values())
    pinned = sum(pin.bytes for pin in pins)
    document = {
        "store": store.url,
        "objects": objects,
        "bytes": total,
        "chunks": census.chunks,
        "contexts": census.contexts,
        "kinds": {name: asdict(counted) for name, counted in census.kinds.items()},
        "forms": {name: asdict(counted) for name, counted in census.forms.items()},
        "pinned": {"objects": len(pins), "bytes": pinned, "cap": cap},
        "quarantined": {"copies": len(damaged), "bytes": sum(copy.bytes for copy in damaged)},
    }
    of = "" if cap is None else f" of at most {size(cap)}"
    rows: list[tuple[str, object]] = [
        ("objects", objects),
        ("bytes", size(total)),
        ("chunks", census.chunks),
        ("contexts", census.contexts),
        *((name, f"{c.objects} objects, {size(c.bytes)}") for name, c in census.kinds.items()),
        *((f"of KV {name}", f"{c.objects} objects, {size(c.bytes)}") for name, c in census.forms.items()),
        ("pinned", f"{len(pins)} objects, {size(pinned)}{of}"),
        ("in quarantine", f"{len(damaged)} copies, {size(sum(copy.bytes for copy in damaged))}"),
    ]
    if remote is not None:
        document["remote"] = {"url": remote.url, "pending": remote.pending}
        rows.append(("waiting to be sent", f"{remote.pending} objects"))
    target.out.write(document, [facts(store.url, rows)])


@command
def verify(
    target: StoreArgument,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="First rebuild the index from the files.")
    ] = False,
) -> None:
    """Read every byte of every object; damaged ones go to quarantine, index and files agree afterwards.

    Exit code 1 if an object was damaged or cannot be read.
    """
    with target.opened() as store, target.out.counted("object") as progress:
        if rebuild and target.place.remote and target.place.cache is None:
            raise StoreError(f"{store.url} has no index to rebuild: verify it without --rebuild")
        report = StoreAdmin(store).verify(rebuild=rebuild, progress=progress)
    target.out.report(
        store.url,
        report,
        {"store": store.url},
        ok="intact",
        quarantined="damaged, now in quarantine",
        refused="left in place, unreadable here",
        orphan_files="files the index did not list",
        orphan_rows="rows without a file",
        stale="files of dead writers removed",
    )
    if report.quarantined or report.refused:
        raise typer.Exit(1)
