"""``kamera store ls``, ``stats`` and ``verify``: a store's contents and their integrity."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kamera.cli.output import facts, listing, size
from kamera.cli.store_options import Asked, Kind, moment, on_store
from kamera.errors import StoreError
from kamera.store import StoreAdmin


@on_store
def ls(
    asked: Asked,
    kind: Kind = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The newest N only.")] = None,
) -> None:
    """List a store's objects, oldest first."""
    with asked.opened() as held:
        count = sum(counted.objects for counted in StoreAdmin(held).census(kind).kinds.values())
        shown = held.ls(kind, offset=0 if limit is None else max(0, count - limit))
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
    title = f"{held.url}: {count} objects" + (f", the newest {len(shown)}" if len(shown) < count else "")
    document = {"store": held.url, "objects": count, "listed": [asdict(i) for i in shown]}
    asked.out.write(document, [listing(title, columns, rows)])


@on_store
def stats(asked: Asked, kind: Kind = None) -> None:
    """Count a store's objects, bytes, chunks and contexts, its pins and its damaged copies."""
    with asked.opened() as held:
        admin = StoreAdmin(held)
        census = admin.census(kind)
        pins, cap = admin.pins.list(), admin.pins.cap
        damaged = admin.quarantine.copies()
        remote = admin.stats().remote
    objects = sum(counted.objects for counted in census.kinds.values())
    total = sum(counted.bytes for counted in census.kinds.values())
    pinned = sum(pin.bytes for pin in pins)
    document = {
        "store": held.url,
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
    asked.out.write(document, [facts(held.url, rows)])


@on_store
def verify(
    asked: Asked,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="First rebuild the index from the files.")
    ] = False,
) -> None:
    """Read every byte of every object; damaged ones go to quarantine, index and files agree afterwards.

    Exit code 1 if an object was damaged or cannot be read.
    """
    with asked.opened() as held, asked.out.counted("object") as progress:
        if rebuild and asked.place.remote and asked.place.cache is None:
            raise StoreError(f"{held.url} has no index to rebuild: verify it without --rebuild")
        report = StoreAdmin(held).verify(rebuild=rebuild, progress=progress)
    rows: list[tuple[str, object]] = [
        ("intact", report.ok),
        ("damaged, now in quarantine", len(report.quarantined)),
        ("left in place, unreadable here", len(report.refused)),
        ("files the index did not list", report.orphan_files),
        ("rows without a file", report.orphan_rows),
        ("files of dead writers removed", report.stale),
    ]
    lines = [f"damaged: {line}" for line in report.quarantined]
    lines += [f"unreadable: {line}" for line in report.refused]
    asked.out.write(
        {"store": held.url, **asdict(report)},
        [facts(held.url, rows), *lines],
    )
    if report.quarantined or report.refused:
        raise typer.Exit(1)
