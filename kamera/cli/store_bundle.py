"""``kamera store export`` and ``import``: objects and certificates between stores in one file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.output import facts, size
from kamera.cli.store_options import Asked, Certificates, on_store
from kamera.store import StoreAdmin


@on_store
def export_bundle(
    asked: Asked,
    bundle: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="The bundle to write.")],
    chunk: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this chunk; may be given several times.")
    ] = None,
    certificates: Certificates = True,
) -> None:
    """Write a store's objects to one file, unencrypted. Exit code 1 if some could not be read."""
    with asked.opened() as store, asked.out.counted("object") as progress:
        done = StoreAdmin(store).export_bundle(bundle, chunk, certificates=certificates, progress=progress)
    rows: list[tuple[str, object]] = [
        ("bytes", size(done.bytes)),
        ("canonicals", done.canonicals),
        ("patches", done.patches),
        ("encodings", done.encodings),
        ("anchors", done.anchors),
    ]
    rows += [("certificates", done.certificates), *(("refused", line) for line in done.refused)]
    asked.out.write(asdict(done), [facts(done.path, rows)])
    if done.refused:
        raise typer.Exit(1)


@on_store
def import_bundle(
    asked: Asked,
    bundle: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A bundle.")],
    certificates: Certificates = True,
) -> None:
    """Import a bundle into a store, created if missing. Exit code 1 if some of it was refused."""
    with asked.opened(make=True) as store, asked.out.counted("object") as progress:
        done = StoreAdmin(store).import_bundle(bundle, certificates=certificates, progress=progress)
        unsaved = len(store.flush(60).unsaved)
    rows: list[tuple[str, object]] = [
        ("canonicals", done.canonicals),
        ("patches", done.patches),
        ("encodings", done.encodings),
        ("anchors", done.anchors),
        ("certificates", done.certificates),
    ]
    rows += [("here already", done.present), *(("refused", line) for line in done.refused)]
    if unsaved:
        rows.append(("not in the remote yet", unsaved))
    document = {"path": str(bundle), "unsaved": unsaved, **asdict(done)}
    asked.out.write(document, [facts(store.url, rows)])
    if done.refused or unsaved:
        raise typer.Exit(1)
