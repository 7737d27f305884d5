"""``kamera store quarantine``: damaged copies of objects."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.output import facts, listing
from kamera.cli.store_options import Older, StoreArgument, moment
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.info import Quarantined

quarantine = typer.Typer(
    help="Damaged copies in quarantine; never served, deleted only on demand.",
    no_args_is_help=True,
)

Copies = Annotated[list[str], typer.Argument(metavar="COPY…", help="Copies, by their file in `ls`.")]


@quarantine.command("ls")
@command
def ls(target: StoreArgument) -> None:
    """List the copies with the reason of each."""
    with target.opened() as store:
        copies = StoreAdmin(store).quarantine.copies()
    _write(target, store, copies, 0)


@quarantine.command("show")
@command
def show(
    target: StoreArgument,
    copy: Annotated[str, typer.Argument(metavar="COPY", help="The copy, by its file in `ls`.")],
) -> None:
    """Read every byte of a copy again and report its contents and its state.

    Changes nothing. Exit code 1 if it is damaged.
    """
    with target.opened() as store:
        judged = StoreAdmin(store).quarantine.judge(copy)
    rows: list[tuple[str, object]] = [
        ("object", judged.copy.name),
        ("bytes", judged.copy.bytes),
        ("set aside (UTC)", moment(judged.copy.when)),
        ("because", judged.copy.reason),
        ("now", "sound: it can be released" if judged.sound else judged.reason),
    ]
    if judged.info is not None:
        rows += [("kind", judged.info.kind), ("chunk", judged.info.chunk_id), ("tokens", judged.info.tokens)]
    target.out.write({"store": store.url, **asdict(judged)}, [facts(copy, rows)])
    if not judged.sound:
        raise typer.Exit(1)


@quarantine.command("release")
@command
def release(target: StoreArgument, copies: Copies) -> None:
    """Return sound copies to the store, unless it holds the object again. The others stay, with a reason.

    Exit code 1 if one stays.
    """
    with target.opened() as store:
        judged = [StoreAdmin(store).quarantine.release(copy) for copy in copies]
    rows = [(j.copy.file, "released" if j.released else "stays", j.reason) for j in judged]
    target.out.write(
        {"store": store.url, "copies": [asdict(j) for j in judged]},
        [listing(store.url, ("file", "now", "why"), rows)],
    )
    if not all(j.released for j in judged):
        raise typer.Exit(1)


@quarantine.command("drop")
@command
def drop(
    target: StoreArgument,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME…", help="Copies by their file, or objects for all of theirs.")
    ] = [],  # noqa: B006 (never modified)
    older: Older = None,
) -> None:
    """Delete copies permanently, by name or by age."""
    if not names and older is None:
        raise ValueError("nothing to delete: give names, or --older TIME")
    with target.opened() as store:
        quarantined = StoreAdmin(store).quarantine
        wanted = list(names)
        if older is not None:
            wanted += [copy.file for copy in quarantined.copies() if copy.when < time.time() - older]
        count = sum(quarantined.drop(name) for name in dict.fromkeys(wanted))
        copies = quarantined.copies()
    _write(target, store, copies, count)


def _write(target: StoreArgument, store: ChunkStore, copies: list[Quarantined], dropped: int) -> None:
    rows = [(copy.file, copy.bytes, moment(copy.when), copy.reason) for copy in copies]
    title = f"{store.url}: {len(copies)} damaged copies" + (f", {dropped} deleted" if dropped else "")
    document = {"store": store.url, "dropped": dropped, "copies": [asdict(copy) for copy in copies]}
    target.out.write(document, [listing(title, ("file", "bytes", "set aside (UTC)", "why"), rows)])
