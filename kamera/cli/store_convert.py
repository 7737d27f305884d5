"""``kamera store convert``: a store's canonicals as codes, in another store."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from kamera.cli.options import Held, KVHeld
from kamera.cli.output import facts, size
from kamera.cli.store_options import Asked, on_store, store_url
from kamera.store import StoreAdmin


@on_store
def convert(
    asked: Asked,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", callback=store_url, help="The store to write to; created if missing."
        ),
    ],
    kv: KVHeld = Held.int8,
) -> None:
    """Write a store's canonicals in codes of 8 or 4 bits into another store of the same tenant and secret.

    The source does not change. Patches are not converted: compile them again for the codes. Exit code 1 if a
    canonical was refused.
    """
    other = replace(asked, place=replace(asked.place, url=target, cache=None))
    with (
        asked.opened() as source,
        other.opened(make=True) as store,
        asked.out.counted("object") as progress,
    ):
        done = StoreAdmin(source).convert(store, kv.form, progress=progress)
        unsaved = len(store.flush(60).unsaved)
    rows: list[tuple[str, object]] = [
        ("canonicals", done.canonicals),
        ("KV", f"{size(done.kv_before)} before, {size(done.kv_after)} in {kv.value}"),
        ("largest relative error", "" if done.loss is None else f"{done.loss:.2g}"),
        ("there already", done.present),
        ("patches not converted", done.patches),
        *(("refused", line) for line in done.refused),
    ]
    if unsaved:
        rows.append(("not in the remote yet", unsaved))
    document = {"store": source.url, "target": store.url, "kv": kv.value, "unsaved": unsaved, **asdict(done)}
    asked.out.write(document, [facts(f"{source.url} → {store.url}", rows)])
    if done.refused or unsaved:
        raise typer.Exit(1)
