"""``kamera inspect``: the contents of a store, of one of its objects, or of a saved window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kamera.cli import contents
from kamera.cli.command import command
from kamera.cli.options import Owner
from kamera.cli.output import Output, tables
from kamera.cli.place import StorePlace, store_url
from kamera.errors import StoreError
from kamera.store import StoreAdmin
from kamera.store.directory import MARKER
from kamera.window import WINDOW

_OBJECT = (
    "key kind chunk_id antecedents tokens rank energy dtype bytes percent_of_kv context.fingerprint "
    "context.anchor"
)
_CHUNK = (
    "chunk_id label guarantee tokens copies.copy.rank copies.copy.kv_bytes copies.copy.percent_of_kv "
    "copies.copy.antecedents"
)
"""Columns of the objects of a store, and of the chunks of a window."""


@command
def inspect(
    owner: Owner,
    out: Output,
    where: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A store (a directory, or a remote's url), a saved window, or an object file.",
        ),
    ],
    of: Annotated[
        str | None,
        typer.Argument(
            metavar="OBJECT",
            help="A key in a store, or a chunk's id for all its objects; a beginning is enough.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N objects of a store only.")] = None,
) -> None:
    """Show the contents and verify every byte. Changes nothing.

    Exit code 1 if something is damaged, if PATH is not Kamera's, or if OBJECT matches none or several.
    """
    url = store_url(where) if where.startswith("@") or "://" in where else None
    place = None if url is None else StorePlace(url, owner)
    if place is None and owner != Owner():
        raise ValueError(f"{where!r} is read as plain files: --tenant, secret and keys are for urls")
    path = Path(where if place is None else place.url)
    if of is not None and place is None and not (path / MARKER).is_file():
        raise ValueError(f"{of!r} names an object of a store, but {where!r} is not a store")
    if place is not None and place.remote:
        document = _remote(place, of, limit, out)
        parts = _store_tables(document)
    elif path.is_file():
        document = contents.read_object(path)
        contents.add_relative_sizes([document], path.parents[1] if path.parent.name == "objects" else None)
        parts = _object_tables(document)
    elif (path / MARKER).is_file():
        document = _store(path, of, limit, out)
        parts = _store_tables(document)
    elif (path / WINDOW.name).is_file():
        document = contents.read_window(path)
        parts = tables(document, {"chunks": _CHUNK.split()})
    elif not path.exists():
        raise ValueError(f"nothing is at {str(path)!r}: give a store, a saved window or an object file")
    else:
        raise StoreError(
            f"{str(path)!r} is not a store (no {MARKER}), no saved window (no {WINDOW.name}) and no "
            "object file: give one of these"
        )
    out.write(document, parts)
    if document.get("damaged") or not document.get("intact", True):
        raise typer.Exit(1)


def _store(path: Path, of: str | None, limit: int | None, out: Output) -> dict[str, Any]:
    files = contents.object_files(path) if of is None else contents.files_of(path, of)
    objects = [contents.read_object(file) for file in out.track(files[:limit], len(files[:limit]), "object")]
    contents.add_relative_sizes(objects, path)
    return _document(str(path), len(files), objects, len(list((path / "quarantine").glob("*"))))


def _remote(place: StorePlace, of: str | None, limit: int | None, out: Output) -> dict[str, Any]:
    """As `_store`: every blob is read in place, and none is moved."""
    objects = []
    with place.open_answering() as store:
        admin = StoreAdmin(store)
        names = admin.names() if of is None else admin.keys_of(of)
        for name in out.track(names[:limit], len(names[:limit]), "object"):
            data = admin.load(name)
            if data is not None:  # else it was deleted after the listing
                objects.append(contents.describe(data, name, f"{store.url} {name}", admin.codec))
        copies = len(admin.quarantined())
    contents.add_relative_sizes(objects, None, admin.codec)
    return _document(store.url, len(names), objects, copies)


def _document(path: str, count: int, objects: list[dict[str, Any]], copies: int) -> dict[str, Any]:
    return {
        "path": path,
        "kind": "store",
        "objects": count,
        "inspected": len(objects),
        "bytes": sum(o["bytes"] for o in objects),
        "damaged": sum(not o["intact"] for o in objects),
        "quarantined": copies,
        "contents": objects,
    }


def _store_tables(document: Mapping[str, Any]) -> Iterator[Table | str]:
    intact = [entry for entry in document["contents"] if entry["intact"]]
    errors = [entry["error"] for entry in document["contents"] if not entry["intact"]]
    return tables({**document, "contents": intact, "damaged": errors}, {"contents": _OBJECT.split()})


def _object_tables(document: Mapping[str, Any]) -> Iterator[Table | str]:
    if not document["intact"]:
        return iter([f"damaged: {document['error']}"])
    return tables({**document, "verified": "every byte is as it was written"})
