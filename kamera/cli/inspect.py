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
from kamera.cli.output import Output, facts, listing, size
from kamera.cli.place import StorePlace, store_url
from kamera.cli.store_options import keys_of
from kamera.errors import StoreError
from kamera.ops import Proof
from kamera.store import StoreAdmin
from kamera.store.disk.tier import MARKER
from kamera.window.file import FILE as WINDOW


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
            metavar="OBJECT", help="Of a store: a key, or a chunk's id for all its objects; a start does."
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
        raise ValueError(f"{where!r} is read file by file, and plain: --tenant, secret and keys are for urls")
    path = Path(where if place is None else place.url)
    if of is not None and place is None and not (path / MARKER).is_file():
        raise ValueError(f"{of!r} names an object of a store, and {where!r} is none")
    if place is not None and place.remote:
        document = _remote(place, of, limit, out)
        tables = _store_tables(document)
    elif path.is_file():
        document = contents.read_object(path)
        contents.relate([document], contents.store_of(path))
        tables = _object_tables(document)
    elif (path / MARKER).is_file():
        document = _store(path, of, limit, out)
        tables = _store_tables(document)
    elif (path / WINDOW).is_file():
        document = contents.read_window(path)
        tables = _window_tables(document)
    else:
        raise StoreError(
            f"{str(path)!r} is not a store (no {MARKER}), no saved window (no {WINDOW}) and no object file: "
            "give one of these"
        )
    out.write(document, tables)
    if document.get("damaged") or not document.get("intact", True):
        raise typer.Exit(1)


def _store(path: Path, of: str | None, limit: int | None, out: Output) -> dict[str, Any]:
    files = contents.object_files(path) if of is None else contents.files_of(path, of)
    objects = []
    with out.progress(len(files[:limit]), "object") as bar:
        for file in files[:limit]:
            objects.append(contents.read_object(file))
            bar.update()
    contents.relate(objects, path)
    return _document(str(path), len(files), objects, len(list((path / "quarantine").glob("*"))))


def _remote(place: StorePlace, of: str | None, limit: int | None, out: Output) -> dict[str, Any]:
    """As `_store`: every blob is read in place, and none is moved."""
    objects = []
    with place.open_answering() as store:
        raw = StoreAdmin(store).objects
        names = raw.names() if of is None else keys_of(store, [of])
        with out.progress(len(names[:limit]), "object") as bar:
            for name in names[:limit]:
                data = raw.load(name)
                if data is not None:  # else it was deleted after the listing
                    objects.append(contents.describe(data, name, f"{store.url} {name}", raw.codec))
                bar.update()
        copies = len(StoreAdmin(store).quarantine.copies())
    contents.relate(objects, None, raw.codec)
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


def _store_tables(document: dict[str, Any]) -> Iterator[Table | str]:
    intact = [o for o in document["contents"] if o["intact"]]
    yield listing(
        f"{document['path']}: {document['inspected']} of {document['objects']} objects, "
        f"{size(document['bytes'])}",
        ("key", "kind", "chunk", "behind", "tokens", "rank", "energy", "dtype", "bytes", "of KV", "context"),
        [
            (
                o["key"][:12],
                o["kind"],
                o["chunk_id"][:12],
                " ".join(a[:8] for a in o["antecedents"]),
                o["tokens"],
                o["rank"],
                _share(o["energy"]),
                o["dtype"],
                o["bytes"],
                _percent(o["percent_of_kv"]),
                f"{o['context']['fingerprint'][:8]}/{o['context']['anchor'][:8]}",
            )
            for o in intact
        ],
    )
    yield from (f"damaged: {o['error']}" for o in document["contents"] if not o["intact"])
    if document["quarantined"]:
        yield f"{document['quarantined']} damaged files are in quarantine/ already"
    yield f"verified: {len(intact)} intact, {document['damaged']} damaged"


def _object_tables(document: dict[str, Any]) -> Iterator[Table | str]:
    if not document["intact"]:
        yield f"damaged: {document['error']}"
        return
    context = document["context"]
    yield facts(
        document["path"],
        [
            ("kind", document["kind"]),
            ("key", document["key"]),
            ("chunk", document["chunk_id"]),
            ("backbone", context["fingerprint"]),
            ("anchor", context["anchor"]),
            ("tenant", context["tenant"] or "none"),
            ("behind", "\n".join(document["antecedents"]) or "the anchor alone"),
            ("tokens", document["tokens"]),
            ("rank", "" if document["rank"] is None else document["rank"]),
            ("energy kept", _share(document["energy"])),
            ("antecedents were", document["formed"] or ""),
            ("proof", _proof(document["proof"])),
            ("layers", document["layers"]),
            ("KV held", _form(context["kv"], document.get("loss"))),
            ("bytes", f"{document['bytes']} in the file, {document['tensor_bytes']} of tensors"),
            (
                "of the chunk's KV",
                _percent(document["percent_of_kv"]) or "unknown: its canonical is not at hand",
            ),
            ("info", document["info"]),
            ("verified", "every byte is as it was written"),
        ],
    )
    yield ""
    yield _channel_table(document["channels"])


def _window_tables(document: dict[str, Any]) -> Iterator[Table | str]:
    yield facts(
        f"{document['path']}: a window of {len(document['chunks'])} chunks",
        [
            ("backbone", document["fingerprint"]),
            ("tenant", document["tenant"] or "none"),
            ("tokens", f"{document['tokens']} of {document['max_tokens'] or 'any number'}"),
            ("anchor", f"{document['anchor_tokens']} tokens"),
            ("policy", document["policy"]),
            ("bytes", size(document["bytes"])),
            ("verified", "every byte is as it was written"),
        ],
    )
    yield ""
    rows = []
    for chunk in document["chunks"]:
        for name, copy in chunk["copies"].items():
            rows.append(
                (
                    chunk["chunk_id"][:12],
                    chunk["label"],
                    chunk["guarantee"] if name == "copy" else "shown clean",
                    chunk["tokens"],
                    copy["rank"],
                    size(copy["kv_bytes"]),
                    _percent(copy["percent_of_kv"]),
                    " ".join(a[:8] for a in copy["antecedents"]),
                )
            )
    yield listing("", ("chunk", "label", "guarantee", "tokens", "rank", "KV", "patch", "behind"), rows)
    if document["chunks"]:
        yield ""
        yield _channel_table(document["chunks"][0]["copies"]["copy"]["channels"])


def _channel_table(channels: dict[str, dict[str, Any]]) -> Table:
    rows = [
        (name, c["layers"], c["dtype"], " ".join("x".join(map(str, s)) for s in c["shapes"]))
        for name, c in channels.items()
    ]
    return listing("", ("channel", "layers", "dtype", "shape"), rows)


def _form(kv: str, loss: dict[str, Any] | None) -> str:
    return kv if loss is None else f"{kv}: relative error {loss['relative']}, at most {loss['largest']}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} %"


def _proof(told: Mapping[str, Any] | None) -> str:
    proof = Proof.from_info({"proof": told})
    return "none was asked for" if proof is None else str(proof)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
