"""``kamera store``: what a store directory holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.options import File, Form, Format, Quiet, Tenant
from kamera.cli.output import Output, facts, listing, size
from kamera.errors import StoreError
from kamera.store import ChunkStore
from kamera.store.disk import MARKER
from kamera.store.keys import KINDS

store = typer.Typer(help="What a store directory holds.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A store directory.")]


@store.command("ls")
def ls(
    directory: Directory,
    kind: Annotated[str | None, typer.Option(help=f"Only objects of a kind: {', '.join(KINDS)}.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The newest N only.")] = None,
    tenant: Tenant = "",
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """List a store's objects, oldest first."""
    out = Output(format, output, quiet)
    with _opened(directory, tenant) as opened:
        found = opened.ls(kind)
    shown = found if limit is None else found[-limit:]
    rows = [
        (
            i.key[:12],
            i.kind,
            i.chunk_id[:12],
            i.tokens,
            i.rank,
            i.formed or "",
            " ".join(a[:8] for a in i.antecedents),
            i.bytes,
            datetime.fromtimestamp(i.created, timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
        )
        for i in shown
    ]
    columns = ("key", "kind", "chunk", "tokens", "rank", "formed", "antecedents", "bytes", "created (UTC)")
    title = f"{directory}: {len(found)} objects" + (
        f", the newest {len(shown)}" if len(shown) < len(found) else ""
    )
    document = {"store": str(directory), "objects": len(found), "listed": [asdict(i) for i in shown]}
    out.write(document, [listing(title, columns, rows)])


@store.command("stats")
def stats(
    directory: Directory,
    kind: Annotated[str | None, typer.Option(help=f"Only objects of a kind: {', '.join(KINDS)}.")] = None,
    tenant: Tenant = "",
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Count a store's objects, bytes, chunks and contexts."""
    out = Output(format, output, quiet)
    with _opened(directory, tenant) as opened:
        found = opened.ls(kind)
    kinds = {
        name: {
            "objects": sum(i.kind == name for i in found),
            "bytes": sum(i.bytes for i in found if i.kind == name),
        }
        for name in KINDS
        if kind in (None, name)
    }
    document = {
        "store": str(directory),
        "objects": len(found),
        "bytes": sum(i.bytes for i in found),
        "chunks": len({i.chunk_id for i in found}),
        "contexts": len({i.context for i in found}),
        "kinds": kinds,
    }
    rows: list[tuple[str, object]] = [
        ("objects", len(found)),
        ("bytes", size(sum(i.bytes for i in found))),
        ("chunks", document["chunks"]),
        ("contexts", document["contexts"]),
        *((name, f"{c['objects']} objects, {size(c['bytes'])}") for name, c in kinds.items()),
    ]
    out.write(document, [facts(str(directory), rows)])


@contextmanager
def _opened(directory: Path, tenant: str) -> Iterator[ChunkStore]:
    """The store at ``directory``, which must be one: listing never makes it."""
    if not (directory / MARKER).is_file():
        raise StoreError(
            f"{str(directory)!r} is no kamera store (it has no {MARKER}): give a store's directory"
        )
    with ChunkStore.open(directory, tenant=tenant) as opened:
        yield opened
