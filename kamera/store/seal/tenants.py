"""The codec and directory of a store: for plain, sealed or encrypted objects.

A tenant that holds a secret has a directory of its own, named by a keyed digest of its name. No operation
of another tenant in the store touches a file or a row of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kamera.errors import StoreError
from kamera.store.codec import Codec
from kamera.store.disk.marker import open_directory
from kamera.store.seal.codec import Sealed

TENANTS = "tenants"
"""Folder of a store directory for the directories of tenants with a secret."""


def codec_of(tenant: str, secret: bytes | str | None, keys: Sequence[bytes]) -> Codec:
    """The codec of ``tenant``'s objects. Raises `ValueError` for a secret or keys that cannot be used."""
    if secret is None:
        if keys:
            raise ValueError("keys encrypt what a secret names: give secret= as well")
        return Codec()
    if not keys:
        return Sealed.of(tenant, secret)
    from kamera.store.seal.encryption import Encrypted  # needs an optional dependency

    return Encrypted.under(tenant, secret, keys)


def directory_of(root: Path, codec: Codec, *, read_only: bool = False) -> Path:
    """The directory of a codec's objects in ``root``, which is made a store directory first.

    Raises `StoreError` and `StoreVersionError` as `marker.open_directory`.
    """
    if not isinstance(codec, Sealed):
        return root
    name = codec.key_for("kamera.folder.v1").hex()
    try:
        with (
            open_directory(root, Codec().marker, make=not read_only) as store,
            store.sub(TENANTS, make=not read_only) as tenants,
        ):
            store.sync()
            tenants.sub(name, make=not read_only).close()
            tenants.sync()
    except OSError as error:
        raise StoreError(f"store {root}: cannot open: {error}") from error
    return root / TENANTS / name
