"""From a store's url to its remote tier; the drivers' libraries are imported only when needed."""

from __future__ import annotations

from math import inf
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from kamera.errors import KameraError, StoreError
from kamera.ops import digest
from kamera.store.codec import Codec
from kamera.store.remote.guard import COOLDOWN
from kamera.store.remote.tier import RemoteTier

# the scheme as given, and the driver library's name for it
_REDIS = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "redis+unix": "unix",
}
_OBJECTS = {"s3": "s3", "gs": "gs", "obstore+file": "file", "obstore+memory": "memory"}
_MOONCAKE = "mooncake"

SCHEMES = (*_REDIS, *_OBJECTS, _MOONCAKE)
TIMEOUT = 2.0
"""Seconds a remote may take for one answer, unless the url says ``?timeout=``."""
RETRIES = 1
"""Repetitions of a failed call, unless the url says ``?retries=``."""
_LIMITS = {"timeout": TIMEOUT, "retries": RETRIES, "cooldown": COOLDOWN}


def is_remote(url: str) -> bool:
    """True if a store's url names a remote."""
    return url.partition("://")[0] in SCHEMES and "://" in url


def open_remote(url: str, codec: Codec, tenant: str) -> RemoteTier:
    """The remote tier of ``tenant`` at ``url``; no request is made, so a remote that is down opens too.

    ``redis://…``, ``rediss://…``, ``valkey://…``, ``redis+unix:///socket``, ``mooncake://master:50051``
    (with ``?prefix=kamera``), ``s3://bucket/path``, ``gs://bucket/path``, ``obstore+file:///path``,
    ``obstore+memory://``; all with ``?timeout=seconds``, ``?retries=n``, and ``?cooldown=seconds`` (time
    without calls to a remote that is down). Raises `StoreError` when the driver's library is missing or
    rejects the url.
    """
    parts = urlsplit(url)
    scheme, query = parts.scheme, dict(parse_qsl(parts.query, keep_blank_values=True))
    limits = {name: query.pop(name, str(default)) for name, default in _LIMITS.items()}
    try:
        timeout, cooldown, retries = (
            float(limits["timeout"]),
            float(limits["cooldown"]),
            int(limits["retries"]),
        )
    except ValueError:
        timeout, cooldown, retries = -1.0, -1.0, -1
    if not (0 < timeout < inf and 0 < cooldown < inf and retries >= 0):
        raise ValueError(
            f"{urlencode(limits)}: give seconds above 0 for timeout and cooldown, 0 or more retries"
        )
    own = {"prefix": query.pop("prefix")} if "prefix" in query else {}
    prefix = f"{own['prefix'].rstrip('/')}/" if own else "" if scheme in _OBJECTS else "kamera/"
    # through the codec, so that a guess of a sealed store's tenant name cannot be confirmed
    prefix += f"v1/{codec.name(digest('kamera.tenant.v1', tenant))}/"
    theirs = {**_REDIS, **_OBJECTS}.get(scheme, scheme)
    shown_url = _join(scheme, parts.netloc.rpartition("@")[2] + parts.path, own)
    try:
        blobs = _driver(scheme)(
            _join(theirs, parts.netloc + parts.path, query),
            prefix,
            timeout=timeout,
            retries=retries,
            shown_url=shown_url,
        )
    except ImportError as error:
        extra = "mooncake" if scheme == _MOONCAKE else "remote"
        raise StoreError(
            f"{scheme}:// needs a library that is not installed ({error}): pip install 'kamera-kv[{extra}]'"
        ) from error
    except KameraError:
        raise
    except Exception as error:  # the library may raise any class for a url it rejects
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise StoreError(f"cannot open {shown_url}: {reason}") from error
    return RemoteTier(blobs, codec, tenant, cooldown)


def _driver(scheme: str) -> Any:
    """The driver of a scheme, which makes `Blobs`."""
    if scheme == _MOONCAKE:
        from kamera.store.remote.mooncake import MooncakeBlobs

        return MooncakeBlobs
    if scheme in _REDIS:
        from kamera.store.remote.redis import RedisBlobs

        return RedisBlobs
    from kamera.store.remote.objects import ObjectBlobs

    return ObjectBlobs.open


def _join(scheme: str, place: str, query: dict[str, str]) -> str:
    return f"{scheme}://{place}{'?' if query else ''}{urlencode(query)}"
