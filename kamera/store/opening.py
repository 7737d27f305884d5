"""The tiers of a store, by what it is opened at."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kamera.errors import StoreError, quote
from kamera.files import user_path
from kamera.store.codec import Codec
from kamera.store.disk.tier import DiskTier
from kamera.store.quantities import parse_size
from kamera.store.remote import SCHEMES, is_remote, open_remote
from kamera.store.seal.tenants import directory_of
from kamera.store.tiers import Tiers


def open_tiers(
    url: str | os.PathLike[str],
    codec: Codec,
    tenant: str,
    memory_limit: int,
    cache: str | os.PathLike[str] | None,
    disk_limit: int | str | None,
    read_only: bool,
) -> tuple[str, Tiers]:
    """A store's address without credentials, and its tiers; arguments and errors of `ChunkStore.open`."""
    limit = None if disk_limit is None else parse_size(disk_limit, "disk_limit")
    if isinstance(url, str) and is_remote(url):
        if read_only:
            raise ValueError("read_only is for a directory store, and this is a remote")
        if cache is None and limit is not None:
            raise ValueError(f"disk_limit={disk_limit!r} bounds a cache: give cache=DIRECTORY as well")
        remote = open_remote(url, codec, tenant)
        if cache is None:
            return remote.url, Tiers(codec, tenant, memory_limit, remote=remote)
        disk = DiskTier(directory_of(user_path(cache), codec), codec, limit=limit, cache=True)
        return remote.url, Tiers(codec, tenant, memory_limit, disk, remote)
    if cache is not None:
        raise ValueError(f"cache is for a remote store, and {str(url)!r} is none")
    path = path_of(url)
    if path is None:
        if limit is not None or read_only:
            raise ValueError("disk_limit and read_only are for a directory, and 'memory://' is none")
        return "memory://", Tiers(codec, tenant, memory_limit)
    folder = directory_of(path, codec, read_only=read_only)
    disk = DiskTier(folder, codec, read_only=read_only, limit=limit)
    return str(path), Tiers(codec, tenant, memory_limit, disk)


def path_of(url: str | os.PathLike[str]) -> Path | None:
    """The directory that a store's url names; None for ``memory://``. Raises `StoreError` for another url."""
    if not isinstance(url, str):
        return user_path(url)
    if url == "memory://":
        return None
    if "://" not in url:
        return user_path(url)
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise StoreError(
            f"cannot open {quote(url)}: give a directory, file:///directory, memory://, or one of "
            + ", ".join(f"{scheme}://" for scheme in SCHEMES)
        )
    return Path(unquote(parts.path))
