"""Stores of tenants with a secret, from the command line: secret and keys come from files.

Never from arguments, which every user of the machine can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kamera.errors import StoreError
from kamera.store import ChunkStore
from kamera.store.disk.tier import MARKER

SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file", exists=True, dir_okay=False, help="The tenant's secret: all bytes of a file."
    ),
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--key-file",
        exists=True,
        dir_okay=False,
        help="A file of 32 bytes that encrypts; the one to write with first, older ones behind it.",
    ),
]


@contextmanager
def opened(
    directory: Path,
    tenant: str,
    secret_file: Path | None = None,
    key_files: Sequence[Path] | None = None,
    *,
    make: bool = False,
) -> Iterator[ChunkStore]:
    """The store at ``directory``; unless it is to ``make``, it must be there: looking makes none."""
    if not make and not (directory / MARKER).is_file():
        raise StoreError(
            f"{str(directory)!r} is no kamera store (it has no {MARKER}): give a store's directory"
        )
    secret = None if secret_file is None else secret_file.read_bytes()
    keys = [path.read_bytes() for path in key_files or ()]
    with ChunkStore.open(directory, tenant=tenant, secret=secret, keys=keys) as store:
        yield store
