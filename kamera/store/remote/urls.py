"""From a store's url to its remote tier; the drivers' libraries are imported only when needed."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple
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

_MOONCAKE = {"mooncake": "mooncake"}

SCHEMES = (*_REDIS, *_OBJECTS, *_MOONCAKE)
TIMEOUT = 2.0
"""Seconds a remote may take for one answer, unless the url says ``?timeout=``."""
RETRIES = 1
"""Repetitions of a failed call, unless the url says ``?retries=``."""
_LIMITS = {"timeout": TIMEOUT, "retries": RETRIES, "cooldown": COOLDOWN}


class _Place(NamedTuple):
    url: str  # for the driver
    shown: str  # without credentials
    prefix: str
    timeout: float
    retries: int
    cooldown: float


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
    scheme = urlsplit(url).scheme
    place = _place(url, {**_REDIS, **_OBJECTS, **_MOONCAKE}[scheme], "" if scheme in _OBJECTS else "kamera/")
    # through the codec, so that a guess of a sealed store's tenant name cannot be confirmed
    owner = codec.name(digest("kamera.tenant.v1", tenant))
    place = place._replace(prefix=f"{place.prefix}v1/{owner}/")
    try:
        blobs = _driver(scheme)(
            place.url, place.prefix, timeout=place.timeout, retries=place.retries, shown=place.shown
        )
    except ImportError as error:
        extra = "mooncake" if scheme in _MOONCAKE else "remote"
        raise StoreError(
            f"{scheme}:// needs a library that is not installed ({error}): pip install 'kamera[{extra}]'"
        ) from error
    except KameraError:
        raise
    except Exception as error:  # the library may raise any class for a url it rejects
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise StoreError(f"cannot open {place.shown}: {reason}") from error
    return RemoteTier(blobs, codec, tenant, place.cooldown)


def _driver(scheme: str) -> Any:
    """The driver of a scheme, which makes `Blobs`."""
    if scheme in _MOONCAKE:
        from kamera.store.remote.mooncake import MooncakeBlobs

        return MooncakeBlobs
    if scheme in _REDIS:
        from kamera.store.remote.redis import RedisBlobs

        return RedisBlobs
    from kamera.store.remote.objects import ObjectBlobs

    return ObjectBlobs.open


def _place(url: str, scheme: str, prefix: str) -> _Place:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
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
    chosen = {"prefix": query.pop("prefix")} if "prefix" in query else {}
    if chosen:
        prefix = chosen["prefix"].rstrip("/") + "/"
    host = parts.netloc.rpartition("@")[2]
    return _Place(
        url=_joined(scheme, parts.netloc + parts.path, query),
        shown=_joined(parts.scheme, host + parts.path, chosen),
        prefix=prefix,
        timeout=timeout,
        retries=retries,
        cooldown=cooldown,
    )


def _joined(scheme: str, place: str, query: dict[str, str]) -> str:
    return f"{scheme}://{place}{'?' if query else ''}{urlencode(query)}"
