"""``kamera store``: what a store directory holds, and whether it is sound."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.options import File, Form, Format, Quiet, Tenant
from kamera.cli.output import Output, facts, listing, size
from kamera.cli.sealed import KeyFiles, SecretFile, opened
from kamera.store import ChunkStore
from kamera.store.keys import KINDS

store = typer.Typer(help="What a store directory holds, and its upkeep.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A store directory.")]


@store.command("ls")
def ls(
    directory: Directory,
    kind: Annotated[str | None, typer.Option(help=f"Only objects of a kind: {', '.join(KINDS)}.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The newest N only.")] = None,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """List a store's objects, oldest first."""
    out = Output(format, output, quiet)
    with opened(directory, tenant, secret_file, key_file) as held:
        count = sum(counted.objects for counted in held.census(kind).kinds.values())
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
    title = f"{directory}: {count} objects" + (f", the newest {len(shown)}" if len(shown) < count else "")
    document = {"store": str(directory), "objects": count, "listed": [asdict(i) for i in shown]}
    out.write(document, [listing(title, columns, rows)])


@store.command("stats")
def stats(
    directory: Directory,
    kind: Annotated[str | None, typer.Option(help=f"Only objects of a kind: {', '.join(KINDS)}.")] = None,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Count a store's objects, bytes, chunks and contexts, its pins and its damaged copies."""
    out = Output(format, output, quiet)
    with opened(directory, tenant, secret_file, key_file) as held:
        census = held.census(kind)
        pins, cap = held.pins.list(), held.pins.cap
        damaged = held.quarantined()
    objects = sum(counted.objects for counted in census.kinds.values())
    total = sum(counted.bytes for counted in census.kinds.values())
    pinned = sum(pin.bytes for pin in pins)
    document = {
        "store": str(directory),
        "objects": objects,
        "bytes": total,
        "chunks": census.chunks,
        "contexts": census.contexts,
        "kinds": {name: asdict(counted) for name, counted in census.kinds.items()},
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
        ("pinned", f"{len(pins)} objects, {size(pinned)}{of}"),
        ("in quarantine", f"{len(damaged)} copies, {size(sum(copy.bytes for copy in damaged))}"),
    ]
    out.write(document, [facts(str(directory), rows)])


@store.command("verify")
def verify(
    directory: Directory,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the index anew from the files first.")
    ] = False,
    tenant: Tenant = "",
    secret_file: SecretFile = None,
    key_file: KeyFiles = None,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Read every byte of every object; damaged ones go to quarantine, index and files agree afterwards.

    Exit code 1 when something was damaged or cannot be read.
    """
    out = Output(format, output, quiet)
    with opened(directory, tenant, secret_file, key_file) as held, out.counted("object") as progress:
        report = held.verify(rebuild=rebuild, progress=progress)
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
    out.write(
        {"store": str(directory), **asdict(report)},
        [facts(str(directory), rows), *lines, *report.embeddings],
    )
    if report.quarantined or report.refused:
        raise typer.Exit(1)


def moment(seconds: float | None) -> str:
    """A time in UTC for people; empty for none."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def keys_of(held: ChunkStore, targets: list[str]) -> list[str]:
    """Keys of the objects that ``targets`` name: a key, a chunk's id (all its objects), or the start of one.

    Raises `ValueError` for a start that fits several, or none.
    """
    objects = held.ls()
    found: list[str] = []
    for target in targets:
        keys = [i.key for i in objects if i.key.startswith(target)]
        chunks = {i.chunk_id for i in objects if i.chunk_id.startswith(target)}
        if len(keys) + len(chunks) != 1:
            many = "fits several objects or chunks: give more of it" if keys or chunks else "is neither here"
            raise ValueError(f"{target!r} names an object by its key or a chunk by its id, and {many}")
        found += keys or [i.key for i in objects if i.chunk_id in chunks]
    return list(dict.fromkeys(found))
