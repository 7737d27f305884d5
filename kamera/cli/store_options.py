"""The store of a verb of ``kamera store``, and what names its objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.options import Owner, size
from kamera.cli.output import Output
from kamera.cli.place import StorePlace, store_url
from kamera.errors import RemoteUnavailable
from kamera.store import ChunkStore, StoreAdmin, parse_duration
from kamera.store.keys import KINDS


def duration(text: str) -> float:
    """Seconds of a duration such as 12h; `typer.BadParameter` for anything else."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Kind = Annotated[str | None, typer.Option(help=f"Only objects of a kind: {', '.join(KINDS)}.")]
Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="OBJECT…", help="Keys, or ids of chunks for all their objects; beginnings are enough."
    ),
]
Older = Annotated[
    float | None,
    typer.Option(
        metavar="TIME", parser=duration, help="Delete copies in quarantine older than this, e.g. 30d."
    ),
]
MaxBytes = Annotated[
    int | None,
    typer.Option(metavar="SIZE", parser=size, help="Most bytes of all objects, e.g. 20GiB."),
]


@dataclass(frozen=True)
class StoreArgument:
    """The STORE of a verb, and how it is opened."""

    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            callback=store_url,
            help="A directory, file://, redis://, rediss://, s3://, gs://, obstore+file://; @FILE: its text.",
        ),
    ]
    owner: Owner
    out: Output
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="The directory in front of a remote."),
    ] = None

    @contextmanager
    def open(self, *, make: bool = False) -> Iterator[ChunkStore]:
        """The store, which must exist unless ``make`` creates it.

        Raises `RemoteUnavailable` for a remote that stops answering: its objects would silently be missing
        from the result.
        """
        with StorePlace(self.store, self.owner, cache=self.cache).open_answering(make=make) as store:
            yield store
            remote = StoreAdmin(store).stats().remote
            if remote is not None and remote.reads != "closed":
                raise RemoteUnavailable(f"{store.url} stopped answering: {remote.last_error}")
