"""``kamera store quarantine``: damaged copies of objects."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from kamera.cli.output import facts, listing
from kamera.cli.store_options import Asked, Older, moment, on_store
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.info import Quarantined

quarantine = typer.Typer(
    help="Damaged copies in quarantine; never served, deleted only on demand.",
    no_args_is_help=True,
)

Copies = Annotated[list[str], typer.Argument(metavar="COPY…", help="Copies, by their file in `ls`.")]


@quarantine.command("ls")
@on_store
def ls(asked: Asked) -> None:
    """List the copies with the reason of each."""
    with asked.opened() as held:
        copies = StoreAdmin(held).quarantine.copies()
    _write(asked, held, copies, 0)


@quarantine.command("show")
@on_store
def show(
    asked: Asked, copy: Annotated[str, typer.Argument(metavar="COPY", help="The copy, by its file in `ls`.")]
) -> None:
    """Read every byte of a copy again and report its contents and its state.

    Changes nothing. Exit code 1 if it is damaged.
    """
    with asked.opened() as held:
        judged = StoreAdmin(held).quarantine.judge(copy)
    rows: list[tuple[str, object]] = [
        ("object", judged.copy.name),
        ("bytes", judged.copy.bytes),
        ("set aside (UTC)", moment(judged.copy.when)),
        ("because", judged.copy.reason),
        ("now", "sound: it can be released" if judged.sound else judged.reason),
    ]
    if judged.info is not None:
        rows += [("kind", judged.info.kind), ("chunk", judged.info.chunk_id), ("tokens", judged.info.tokens)]
    asked.out.write({"store": held.url, **asdict(judged)}, [facts(copy, rows)])
    if not judged.sound:
        raise typer.Exit(1)


@quarantine.command("release")
@on_store
def release(asked: Asked, copies: Copies) -> None:
    """Return sound copies to the store, unless it holds the object again. The others stay, with a reason.

    Exit code 1 if one stays.
    """
    with asked.opened() as held:
        judged = [StoreAdmin(held).quarantine.release(copy) for copy in copies]
    rows = [(j.copy.file, "released" if j.released else "stays", j.reason) for j in judged]
    asked.out.write(
        {"store": held.url, "copies": [asdict(j) for j in judged]},
        [listing(held.url, ("file", "now", "why"), rows)],
    )
    if not all(j.released for j in judged):
        raise typer.Exit(1)


@quarantine.command("drop")
@on_store
def drop(
    asked: Asked,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME…", help="Copies by their file, or objects for all of theirs.")
    ] = [],  # noqa: B006 (never modified)
    older: Older = None,
) -> None:
    """Delete copies permanently, by name or by age."""
    if not names and older is None:
        raise ValueError("nothing to delete: give names, or --older TIME")
    with asked.opened() as held:
        ward = StoreAdmin(held).quarantine
        wanted = list(names)
        if older is not None:
            wanted += [copy.file for copy in ward.copies() if copy.when < time.time() - older]
        dropped = sum(ward.drop(name) for name in dict.fromkeys(wanted))
        copies = ward.copies()
    _write(asked, held, copies, dropped)


def _write(asked: Asked, held: ChunkStore, copies: list[Quarantined], dropped: int) -> None:
    rows = [(copy.file, copy.bytes, moment(copy.when), copy.reason) for copy in copies]
    title = f"{held.url}: {len(copies)} damaged copies" + (f", {dropped} deleted" if dropped else "")
    document = {"store": held.url, "dropped": dropped, "copies": [asdict(copy) for copy in copies]}
    asked.out.write(document, [listing(title, ("file", "bytes", "set aside (UTC)", "why"), rows)])
