"""The file that marks a directory as a store and states its kind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kamera.errors import StoreError, StoreVersionError
from kamera.files import publish_file
from kamera.store.disk.folder import Folder

MARKER = "kamera-store.json"


def open_directory(root: Path, marker: Mapping[str, Any], *, make: bool = True) -> Folder:
    """The store directory ``root`` with this ``marker``; made if it is empty or absent and ``make``.

    Raises `OSError`, `StoreError` for another use, `StoreVersionError` for another format; nothing changes.
    """
    with contextlib.suppress(FileNotFoundError):
        folder = Folder.at(root)
        try:
            _check(root, folder.read(MARKER)[0], marker)
            return folder
        except FileNotFoundError:
            names = folder.names()
        if MARKER in names:  # another process has just made the store
            return open_directory(root, marker, make=make)
        if any(not name.startswith(".kamera") for name in names):
            raise StoreError(
                f"{root} is not empty and no kamera store (no {MARKER}): give an empty or new directory"
            )
    if not make:
        raise StoreError(f"{root} is no kamera store, and none is made to be read only")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = Folder.at(root)
    # the marker comes first, so that a half-made store is never taken for another program's folder
    with publish_file(root / MARKER) as file:
        file.write(_text(marker))
    with Folder.at(root.parent) as parent:
        parent.sync()
    return folder


def _check(root: Path, text: bytes, marker: Mapping[str, Any]) -> None:
    place = root / MARKER
    try:
        stored_marker = json.loads(text)
        version = stored_marker["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"{place} is damaged ({error}); restore it: {_text(marker).decode()}") from error
    if type(version) is not int or version < 1:
        raise StoreError(f"{place} is damaged ({version!r}); restore it: {_text(marker).decode()}")
    if version != marker["format"]:
        raise StoreVersionError(
            f"{root} is a store of format {version}, this version reads {marker['format']} here: give the "
            "secret the store was made with, open it with the kamera that made it, or take a new directory"
        )
    if stored_marker != dict(marker):
        raise StoreError(
            f"{root} was made as {json.dumps(stored_marker)}, not as {json.dumps(dict(marker))}: "
            "open it as it was made"
        )


def _text(marker: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(marker)).encode()
