"""Location of a store, for verbs that take a persistent store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from kamera.cli.options import Owner
from kamera.errors import StoreError
from kamera.files import user_path
from kamera.store import ChunkStore, StoreAdmin, is_remote
from kamera.store.directory import MARKER
from kamera.store.keys import KVForm


def store_url(text: str | None) -> str | None:
    """The url of a remote, or the absolute path of a directory; ``@FILE`` reads it from a file.

    So a password need not be an argument. Raises `typer.BadParameter` for anything else.
    """
    if text is not None and text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise typer.BadParameter(f"it has no readable url: {error}") from None
    if text is None:
        return None
    parts = urlsplit(text)
    if parts.scheme in ("memory", "obstore+memory"):
        raise typer.BadParameter(f"{text!r} is gone when this command ends: give a directory or a remote")
    if is_remote(text):
        return text
    if "://" in text and parts.scheme != "file":
        raise typer.BadParameter(
            f"{parts.scheme}:// is not a store: give a directory, file://, redis://, s3://, gs://"
        )
    path = user_path(unquote(parts.path) if "://" in text else text)
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is a file: give a directory or a remote")
    return str(path)


StoreUrl = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="STORE",
        envvar="KAMERA_STORE",
        callback=store_url,
        help="A directory (created if missing) or a remote: redis://, s3://, gs://, obstore+file://.",
    ),
]
"""A url with a password belongs in the environment, which other users of the machine cannot read."""

Coded = Annotated[
    KVForm, typer.Option("--kv", help="Form of stored KV: as it is, or in codes, which are never exact.")
]


NOBODY = Owner()


@dataclass(frozen=True)
class StorePlace:
    """A store to open: ``url`` is a remote's or a directory.

    ``cache`` is a directory in front of a remote.
    """

    url: str
    owner: Owner = NOBODY
    kv: KVForm = "as-is"
    cache: Path | None = None

    @property
    def remote(self) -> bool:
        """True if the store is, or may be, on another machine."""
        return is_remote(self.url)

    @property
    def exists(self) -> bool:
        """True if there is a store to open; a remote is assumed to exist."""
        return self.remote or (Path(self.url).is_dir() and any(Path(self.url).iterdir()))

    def open(self) -> ChunkStore:
        """Open the store; a missing directory is created. Raises the errors of `ChunkStore.open`."""
        return ChunkStore.open(
            self.url,
            tenant=self.owner.tenant,
            secret=None if self.owner.secret_file is None else self.owner.secret_file.read_bytes(),
            keys=[path.read_bytes() for path in self.owner.key_file or ()],
            kv=self.kv,
            cache=self.cache,
        )

    def open_answering(self, *, make: bool = False) -> ChunkStore:
        """Open a store. Raises `StoreError` for a dead remote.

        Unless it may ``make`` one also for what is no store, and ValueError for a path where nothing is.

        In a window a remote that is down gives misses; listing or filling one needs the error.
        """
        if not make and not self.remote and not Path(self.url).exists():
            raise ValueError(f"nothing is at {self.url!r}: give a store's directory")
        if not make and not self.remote and not (Path(self.url) / MARKER).is_file():
            raise StoreError(
                f"{self.url!r} is not a kamera store (it has no {MARKER}): give a store's directory"
            )
        parts = urlsplit(self.url)
        # opening would create it
        if not make and parts.scheme == "obstore+file" and not Path(unquote(parts.path)).is_dir():
            raise StoreError(f"{self.url!r} is not there: give a folder of objects, or fill one first")
        store = self.open()
        try:
            StoreAdmin(store).reach()
        except BaseException:
            store.close()
            raise
        return store
