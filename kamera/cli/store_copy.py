"""``kamera store export``, ``import``, ``convert``, ``rotate``: objects in a file, a store, under a key."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.place import Coded, store_url
from kamera.cli.store_options import StoreArgument
from kamera.store import StoreAdmin

FLUSH_SECONDS = 60
"""Seconds a remote may take to store what was written."""

Certificates = Annotated[
    bool,
    typer.Option("--certificates/--no-certificates", help="Also the certificates of these backbones."),
]


@command
def export_bundle(
    target: StoreArgument,
    bundle: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="The bundle to write.")],
    chunk: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this chunk; may be given several times.")
    ] = None,
    certificates: Certificates = True,
) -> None:
    """Write a store's objects to one file, unencrypted. Exit code 1 if some could not be read."""
    with target.open() as store, target.out.counting("object") as progress:
        done = StoreAdmin(store).export_bundle(bundle, chunk, certificates=certificates, progress=progress)
    target.out.show(asdict(done))
    if done.refused:
        raise typer.Exit(1)


@command
def import_bundle(
    target: StoreArgument,
    bundle: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A bundle.")],
    certificates: Certificates = True,
) -> None:
    """Import a bundle into a store, created if missing. Exit code 1 if some of it was refused."""
    with target.open(make=True) as store, target.out.counting("object") as progress:
        done = StoreAdmin(store).import_bundle(bundle, certificates=certificates, progress=progress)
        unsaved = len(store.flush(FLUSH_SECONDS).unsaved)
    target.out.show({"path": str(bundle), "unsaved": unsaved, **asdict(done)})
    if done.refused or unsaved:
        raise typer.Exit(1)


@command
def convert(
    source: StoreArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", callback=store_url, help="The store to write to; created if missing."
        ),
    ],
    kv: Coded = "int8",
) -> None:
    """Write a store's canonicals in codes of 8 or 4 bits into another store of the same tenant and secret.

    The source does not change. Patches are not converted: compile them again for the codes. Exit code 1 if a
    canonical was refused.
    """
    other = replace(source, store=target, cache=None)
    with (
        source.open() as store,
        other.open(make=True) as coded,
        source.out.counting("object") as progress,
    ):
        done = StoreAdmin(store).convert(coded, kv, progress=progress)
        unsaved = len(coded.flush(FLUSH_SECONDS).unsaved)
    about = {"store": store.url, "target": coded.url, "kv": kv, "unsaved": unsaved}
    source.out.show({**about, **asdict(done)})
    if done.refused or unsaved:
        raise typer.Exit(1)


@command
def rotate(target: StoreArgument) -> None:
    """Re-encrypt every object of a tenant under the first key; the others only decrypt.

    Exit code 1 if some could not be read: then the older keys are still needed.
    """
    with target.open() as store:
        done = StoreAdmin(store).rotate()
    target.out.show({"store": store.url, **asdict(done)})
    if done.refused:
        raise typer.Exit(1)
