"""``kamera store rotate``: re-encrypt a store under a new key."""

from __future__ import annotations

from dataclasses import asdict

import typer

from kamera.cli.output import facts
from kamera.cli.store_options import Asked, on_store
from kamera.store import StoreAdmin


@on_store
def rotate(asked: Asked) -> None:
    """Re-encrypt every object of a tenant under the first key; the others only decrypt.

    Exit code 1 if some could not be read: then the older keys are still needed.
    """
    with asked.opened() as store:
        done = StoreAdmin(store).rotate()
    rows: list[tuple[str, object]] = [("written again", done.rewritten), ("unchanged", done.current)]
    rows += [("refused", line) for line in done.refused]
    asked.out.write({"store": store.url, **asdict(done)}, [facts(store.url, rows)])
    if done.refused:
        raise typer.Exit(1)
