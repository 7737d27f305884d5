"""The tiers of a store, by what it is opened at."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kamera.errors import StoreError, quote
from kamera.store.codec import Codec
from kamera.store.disk.limit import Bounds
from kamera.store.disk.tier import DiskTier
from kamera.store.memory import parse_size
from kamera.store.remote import SCHEMES, open_remote
from kamera.store.seal.tenants import directory_of
from kamera.store.tiers import Tiers


def open_tiers(
    url: str,
    codec: Codec,
    tenant: str,
    memory_limit: int,
    cache: str | os.PathLike[str] | None,
    disk_limit: int | str | None,
) -> Tiers:
    """The tiers of a remote store: memory, the directory ``cache`` if one is given, and ``url``.

    Raises `StoreError` for a cache that belongs to another remote, `ValueError` for a ``disk_limit``
    that is no size, or without a ``cache``.
    """
    if cache is None:
        if disk_limit is not None:
            raise ValueError(f"disk_limit={disk_limit!r} bounds a cache: give cache=DIRECTORY as well")
        return Tiers(codec, tenant, memory_limit, None, open_remote(url, codec, tenant))
    limit = None if disk_limit is None else parse_size(disk_limit)
    remote = open_remote(url, codec, tenant)
    disk = DiskTier(directory_of(Path(cache), codec), codec)
    return Tiers(codec, tenant, memory_limit, disk, remote, limit)


def open_directory_tiers(
    root: Path,
    codec: Codec,
    tenant: str,
    memory_limit: int,
    disk_limit: int | str | None,
    ttl: float | None,
    read_only: bool,
) -> Tiers:
    """The tiers of a directory store: memory, and the directory within its bounds (`disk.limit`)."""
    limit = None if disk_limit is None else parse_size(disk_limit)
    disk = DiskTier(directory_of(root, codec, read_only=read_only), codec, read_only=read_only)
    return Tiers(codec, tenant, memory_limit, disk, bounds=Bounds(disk, limit, ttl))


def path_of(url: str | os.PathLike[str]) -> Path | None:
    """The directory that a store's url names; None for ``memory://``. Raises `StoreError` for another url."""
    if not isinstance(url, str):
        return Path(url)
    if url == "memory://":
        return None
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise StoreError(
            f"cannot open {quote(url)}: give a directory, file:///directory, memory://, or one of "
            + ", ".join(f"{scheme}://" for scheme in SCHEMES)
        )
    return Path(unquote(parts.path))
