"""The remote tier: objects as blobs in Redis, an object store, a shared file system, or Mooncake.

A remote is not trusted: the bytes it returns are an object only after the codec has verified them. Time-outs
and retries are the drivers' (their libraries have them); a breaker stops calls to a remote that does not
answer, tries it again after a while, and logs that once. The drivers' libraries are imported when needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import logging
import os
import random
import re
import sys
import threading
import time
import urllib.request
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, islice
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from kamera.errors import (
    CorruptChunk,
    ForeignKey,
    ForkedStore,
    KameraError,
    RemoteUnavailable,
    StoreError,
    StoreVersionError,
    WrongKey,
)
from kamera.ops import digest
from kamera.store.directory import Quarantined
from kamera.store.format import UNREADABLE, Codec, Source
from kamera.store.keys import is_key
from kamera.store.memory import Pin, Pinned, Pins, pins_of, pins_text
from kamera.store.records import Held, ObjectInfo
from kamera.trust import GUARANTEES, outranks

logger = logging.getLogger(__name__)

OBJECTS, QUARANTINE, PINS = "objects/", "quarantine/", "pins/"
"""Folders of blobs; a pin is a blob named by its object, and the cap is one, too."""
TIMEOUT = 2.0
"""Seconds a remote may take for one answer, unless the url says ``?timeout=``."""
RETRIES = 1
"""Repetitions of a failed call, unless the url says ``?retries=``."""
COOLDOWN = 15.0
"""Seconds without calls to a remote that is down, unless the url says ``?cooldown=``; one call ends them."""
FAILURES = 2
"""Consecutive failed calls after which the remote is not called."""
FRONT = 32 * 1024
"""Bytes within which the headers of most objects are, those of encrypted ones included."""
MARK_BYTES = 128
"""Bytes that change with every object: the digest of a plain or sealed one, the salt of an encrypted one."""

BOUND = 50_000
"""Most headers remembered; those beyond are read by each listing."""

_BATCH = 256  # fronts read at a time
_REDIS = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "redis+unix": "unix",
}
_OBJECTS = {"s3": "s3", "gs": "gs", "obstore+file": "file", "obstore+memory": "memory"}
SCHEMES = (*_REDIS, *_OBJECTS, "mooncake")
"""Schemes of the urls of remotes."""
_T = TypeVar("_T")


BlobHead = tuple[bytes, int]
"""The first bytes of a blob, and its whole size in bytes."""


class Blobs(Protocol):
    """Blobs by name, each stored whole or not at all. Safe to use from several threads.

    Requested names are those of a folder and a name that the store made, so never input from outside. A
    foreign key there fails no call about other names. A call ends within bounded time, and raises only
    ``errors`` or a `KameraError` that does not mean an outage (an operation the service cannot do, a foreign
    value in the place of a blob). A driver is a class that does this for one service.
    """

    url: str
    """Its address without credentials, fit for a log."""
    errors: tuple[type[Exception], ...]
    """Errors its calls raise when the service does not answer, or refuses."""

    def get(self, name: str) -> bytes | None:
        """The whole blob; None if there is none. `ForeignKey` for a key that is not a blob."""
        ...

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        """The first ``length`` bytes of each blob, or all of a shorter one; no bytes of a foreign key."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store a blob, replacing any of that name; it is stored when this returns."""
        ...

    def marks(self, folder: str) -> Mapping[str, str | None]:
        """Names of all blobs that begin with ``folder``, without order, each with its mark.

        Foreign keys are among them, of any name. Raises `StoreError` if one keeps the service's library from
        listing the rest. A mark is a text that changes whenever the blob does; None if the service has none.
        """
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove blobs; absent ones are ignored."""
        ...

    def close(self) -> None:
        """Close the connections; nothing works afterwards."""
        ...


_users: dict[str, int] = {}  # by library: the process that has its threads


def _refuse_child(library: str, url: str) -> None:
    """Raise `ForkedStore` in a child of the process that has used ``library``: a call would never return."""
    user = _users.setdefault(library, os.getpid())
    if user != os.getpid():
        raise ForkedStore(
            f"cannot open {url}: process {user}, which this one was forked from, has used {library}, and its "
            "library's threads are not here: start workers by spawn, or open them in children alone"
        )


class RedisBlobs:
    """Blobs in one database of Redis or Valkey, a string value each; see `Blobs`. There are no marks.

    ``timeout`` (seconds) bounds each wait, ``retries`` the repetitions of a call that timed out.
    """

    MOST = 512 * 2**20
    """The longest value the server takes unless it is configured otherwise (``proto-max-bulk-len``)."""
    _TRIP = 8 * 2**20  # approximate bytes requested in one round trip
    _NAMES = (256, 4096)  # fewest and most names in one round trip

    def __init__(self, url: str, prefix: str, *, timeout: float, retries: int, shown_url: str) -> None:
        import redis
        from redis.backoff import FullJitterBackoff
        from redis.retry import Retry

        self.url = shown_url
        self.errors: tuple[type[Exception], ...] = (redis.RedisError, OSError, ValueError)
        self._prefix = prefix
        tried_again = (redis.ConnectionError, redis.TimeoutError)
        self._client: Any = redis.Redis.from_url(
            url,
            socket_connect_timeout=timeout,
            socket_timeout=timeout,
            retry=Retry(FullJitterBackoff(cap=0.5, base=0.05), retries, tried_again),
        )

    def get(self, name: str) -> bytes | None:
        try:
            data: bytes | None = self._client.get(self._prefix + name)
        except self.errors as error:
            if not self._is_foreign(error):
                raise
            what = f"{self.url} {name}: a key of another type, no object"
            raise ForeignKey(f"{what}: rename or delete it") from error
        return data

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        """See `Blobs`; many in one round trip."""
        heads: list[BlobHead | None] = []
        least, most = self._NAMES
        for batch in _batches(names, min(most, max(least, self._TRIP // length))):
            pipeline = self._client.pipeline(transaction=True)  # both halves of one version
            for name in batch:
                pipeline.getrange(self._prefix + name, 0, length - 1).strlen(self._prefix + name)
            answers = iter(pipeline.execute(raise_on_error=False))
            for data, size in zip(answers, answers, strict=True):
                faults = [answer for answer in (data, size) if isinstance(answer, Exception)]
                if faults and not self._is_foreign(faults[0]):
                    raise faults[0]
                heads.append((b"", 0) if faults else (data, size) if size else None)
        return heads

    def put(self, name: str, data: bytes) -> None:
        if len(data) > self.MOST:
            raise ValueError(f"{len(data)} bytes are more than the {self.MOST} Redis takes in one value")
        self._client.set(self._prefix + name, data)

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`; many in one round trip."""
        for batch in _batches(names, self._NAMES[1]):
            self._client.unlink(*[self._prefix + name for name in batch])

    def marks(self, folder: str) -> Mapping[str, str | None]:
        """See `Blobs`; in steps, so that the server can serve others between them."""
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self._prefix + folder) + "*"
        keys: set[bytes] = set(self._client.scan_iter(match=pattern, count=1000))
        return dict.fromkeys(key.decode(errors="replace")[len(self._prefix) :] for key in keys)

    def close(self) -> None:
        self._client.close()

    @staticmethod
    def _is_foreign(error: Exception) -> bool:
        """True if the error is due to a key of another type, and not to the server."""
        return str(error).startswith("WRONGTYPE")


class ObjectBlobs:
    """Blobs in an object store (S3, Google Cloud Storage) or on a shared file system; see `Blobs`.

    ``url`` is ``s3://``, ``gs://`` (credentials from the environment), ``file://`` or ``memory://``, by
    obstore. ``timeout`` (seconds) bounds the wait for an answer, ``retries`` the repetitions of a failed
    request. A mark is the entity tag.
    """

    _WORKERS = 8  # concurrent look-ups while listing

    def __init__(self, url: str, prefix: str, *, timeout: float, retries: int, shown_url: str) -> None:
        _refuse_child("an object store", shown_url)
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, MemoryStore, from_url

        self.url = shown_url
        self.errors: tuple[type[Exception], ...] = (BaseError, OSError, ValueError)
        self._service = obstore
        self._prefix = prefix
        self._pool = ThreadPoolExecutor(self._WORKERS, thread_name_prefix="kamera-heads")
        parts = urlsplit(url)
        if parts.scheme == "memory":
            self._store: Any = MemoryStore()
        elif parts.scheme == "file":
            root = Path(unquote(parts.path))
            root.mkdir(parents=True, exist_ok=True)
            self._store = LocalStore(root)
        else:
            wait, backoff = timedelta(seconds=timeout), timedelta(milliseconds=500)
            self._store = from_url(
                url,
                client_options={
                    "connect_timeout": wait,
                    "read_timeout": wait,
                    # options given here replace the environment's
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": wait * (retries + 1),
                    "backoff": {"init_backoff": backoff / 10, "max_backoff": backoff, "base": 2},
                },
            )

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._service.get(self._store, self._prefix + name).bytes())
        except FileNotFoundError:
            return None

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        """See `Blobs`; several at once."""
        return list(self._pool.map(lambda name: self._head(self._prefix + name, length), names))

    def put(self, name: str, data: bytes) -> None:
        self._service.put(self._store, self._prefix + name, data)

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`; many in one request if the service supports it."""
        from obstore.store import S3Store

        paths = [self._prefix + name for name in names]
        if isinstance(self._store, S3Store):
            self._service.delete(self._store, paths)
        else:  # they have no bulk deletion, and fail on absent objects
            list(self._pool.map(self._remove, paths))

    def marks(self, folder: str) -> Mapping[str, str | None]:
        """See `Blobs`.

        The library fails on a whole page of names if one is not a valid path (``..``, an empty part). Names
        deeper in the folder can be rolled up, and those sorted before all of ours skipped.
        """
        from obstore.exceptions import InvalidPathError

        folder_path = (self._prefix + folder).rstrip("/")
        start = len(self._prefix)

        def flat(offset: str | None = None) -> dict[str, str | None]:
            chunks = self._service.list(self._store, folder_path, offset=offset, chunk_size=1000)
            return {blob["path"][start:]: blob["e_tag"] for chunk in chunks for blob in chunk}

        def roll_up() -> dict[str, str | None]:
            listing = self._service.list_with_delimiter(self._store, folder_path)
            names = {str(one["path"])[start:]: one["e_tag"] for one in listing["objects"]}
            return names | {f"{prefix[start:]}/": None for prefix in listing["common_prefixes"]}

        strange: dict[str, str | None] = {}
        for way in (flat, roll_up, lambda: flat(f"{folder_path}/0")):
            try:
                return way() | strange
            except InvalidPathError as error:
                match = re.search(r'Path "([^"]*)"', str(error))
                path = str(error).splitlines()[0] if match is None else match.group(1)
                strange[folder + path.partition(self._prefix + folder)[2] if folder in path else path] = None
        raise StoreError(
            f"{self.url} cannot be listed, its library takes {' and '.join(map(repr, strange))} for none: "
            "delete them with the service's own tools"
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _head(self, path: str, length: int) -> BlobHead | None:
        try:
            try:
                answer = self._service.get(self._store, path, options={"range": (0, length)})
                return bytes(answer.bytes()), int(answer.meta["size"])
            except FileNotFoundError:
                return None
            except self.errors:  # a range of an empty blob cannot be requested
                if self._service.head(self._store, path)["size"] != 0:
                    raise
                return b"", 0
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._service.delete(self._store, path)


class MooncakeBlobs:
    """Blobs in memory that Mooncake's clients lend, at the master of ``url``; see `Blobs`.

    The url's query: ``metrics`` (the master's HTTP port, which lists), ``protocol`` and ``devices``.
    Mooncake's time-outs are those of a process: the first one opened sets them, unless its environment does.
    This client lends none. Mooncake evicts what it holds, so pins are refused. There are no marks.
    """

    errors: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, http.client.HTTPException)
    _ABSENT = (-704, -703)  # no such object; one whose first write is not over
    _STAGING = 2**20  # bytes of Mooncake's own buffer, which no call here uses
    _OPTIONS: Mapping[str, str] = {"metrics": "9003", "protocol": "tcp", "devices": ""}

    def __init__(self, url: str, prefix: str, *, timeout: float, retries: int, shown_url: str) -> None:
        _refuse_child("Mooncake", shown_url)
        from mooncake.store import MooncakeDistributedStore

        self.url = shown_url
        self._prefix = prefix
        parts = urlsplit(url)
        self._options = {**self._OPTIONS, **dict(parse_qsl(parts.query))}
        if unknown_options := self._options.keys() - self._OPTIONS:
            raise ValueError(f"{', '.join(sorted(unknown_options))}: give {', '.join(self._OPTIONS)}")
        self._master = f"{parts.hostname}:{parts.port or 50051}"
        self._names = f"http://{parts.hostname}:{int(self._options['metrics'])}/get_all_keys"
        self._timeout = timeout
        self._opening = threading.Lock()
        self._make: Any = MooncakeDistributedStore
        self._client: Any = None
        self._is_closed = False
        seconds, milliseconds = str(max(1, round(timeout))), str(round(timeout * 1000))
        limits = dict.fromkeys(("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"), milliseconds)
        limits |= dict.fromkeys(("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"), seconds)
        limits |= {"MC_STORE_CLIENT_SETUP_RETRIES": str(retries + 1), "MC_LOG_LEVEL": "ERROR"}
        os.environ.update({name: value for name, value in limits.items() if name not in os.environ})

    def get(self, name: str) -> bytes | None:
        [head] = self.read_heads([name], sys.maxsize)
        return None if head is None else head[0]

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        """See `Blobs`; their bytes in one transfer."""
        client, keys = self._connect(), [self._prefix + name for name in names]
        sizes = [self._count(client.get_size(key)) for key in keys]
        ranges = [(i, min(length, size)) for i, size in enumerate(sizes) if size]
        heads: list[BlobHead | None] = [None] * len(keys)
        if not ranges:
            return heads
        *starts, whole = accumulate((part_bytes for _, part_bytes in ranges), initial=0)
        data = bytearray(whole)
        with self._memory(client, data) as address:
            to, of = [[start] for start in starts], [[part_bytes] for _, part_bytes in ranges]
            range_keys = [keys[i] for i, _ in ranges]
            [codes] = client.get_into_ranges([address], [range_keys], [to], [[[0]] * len(of)], [of])
        for (i, part_bytes), start, [code] in zip(ranges, starts, codes, strict=True):
            if self._count(code) == part_bytes:
                heads[i] = bytes(data[start : start + part_bytes]), sizes[i]
        return heads

    def put(self, name: str, data: bytes) -> None:
        if name.startswith(PINS):
            raise StoreError(f"{self.url}: Mooncake evicts what it holds, so it has no pins")
        client, room = self._connect(), bytearray(data)
        with self._memory(client, room) as address:
            if code := client.upsert_from(self._prefix + name, address, len(room)):
                raise OSError(f"Mooncake answered {code} to {len(room)} bytes: has it room for them?")

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`; many in one request."""
        for code in self._connect().batch_remove([self._prefix + name for name in names], True):
            self._count(code)

    def marks(self, folder: str) -> Mapping[str, str | None]:
        """See `Blobs`; from the master's HTTP port."""
        with urllib.request.urlopen(self._names, timeout=self._timeout) as answer:
            keys = answer.read().decode(errors="replace").splitlines()
        start = len(self._prefix)
        return {key[start:]: None for key in keys if key.startswith(self._prefix + folder)}

    def close(self) -> None:
        """See `Blobs`; the client ends behind the last call under way."""
        self._is_closed, self._client = True, None

    def _connect(self) -> Any:
        with self._opening:
            if self._is_closed:
                raise ValueError(f"{self.url} is closed")
            if self._client is None:
                client, how = self._make(), (self._options["protocol"], self._options["devices"])
                self._count(client.setup("localhost", "P2PHANDSHAKE", 0, self._STAGING, *how, self._master))
                self._client = client
            return self._client

    @contextlib.contextmanager
    def _memory(self, client: Any, data: bytearray) -> Iterator[int]:
        """The address of ``data``, which Mooncake reads or writes meanwhile."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        self._count(client.register_buffer(address, len(data)))
        try:
            yield address
        finally:
            client.unregister_buffer(address)

    def _count(self, code: int) -> int:
        """The number that Mooncake returned, 0 for an absent object. Raises OSError for any other error."""
        if code < 0 and code not in self._ABSENT:
            raise OSError(f"Mooncake answered {code}")
        return max(code, 0)


def is_remote(url: str) -> bool:
    """True if a store's url names a remote."""
    return url.partition("://")[0] in SCHEMES and "://" in url


def open_remote(url: str, codec: Codec, tenant: str) -> Remote:
    """The remote tier of ``tenant`` at ``url``; no request is made, so a remote that is down opens too.

    ``redis://…``, ``rediss://…``, ``valkey://…``, ``redis+unix:///socket``, ``mooncake://master:50051``
    (with ``?prefix=kamera``), ``s3://bucket/path``, ``gs://bucket/path``, ``obstore+file:///path``,
    ``obstore+memory://``; all with ``?timeout=seconds``, ``?retries=n``, and ``?cooldown=seconds`` (time
    without calls to a remote that is down). Raises `StoreError` when the driver's library is missing or
    rejects the url.
    """
    parts = urlsplit(url)
    scheme, query = parts.scheme, dict(parse_qsl(parts.query, keep_blank_values=True))
    defaults = {"timeout": TIMEOUT, "retries": RETRIES, "cooldown": COOLDOWN}
    limits = {name: query.pop(name, str(default)) for name, default in defaults.items()}
    try:
        timeout, cooldown = float(limits["timeout"]), float(limits["cooldown"])
        retries = int(limits["retries"])
    except ValueError:
        timeout, cooldown, retries = -1.0, -1.0, -1
    if not (0 < timeout < inf and 0 < cooldown < inf and retries >= 0):
        raise ValueError(
            f"{urlencode(limits)}: give seconds above 0 for timeout and cooldown, 0 or more retries"
        )
    own = {"prefix": query.pop("prefix")} if "prefix" in query else {}
    prefix = f"{own['prefix'].rstrip('/')}/" if own else "" if scheme in _OBJECTS else "kamera/"
    # through the codec, so that a guess of a sealed store's tenant name cannot be confirmed
    prefix += f"v2/{codec.name(digest('kamera.tenant.v1', tenant))}/"
    shown_url = _join(scheme, parts.netloc.rpartition("@")[2] + parts.path, own)
    driver: Any = RedisBlobs if scheme in _REDIS else ObjectBlobs if scheme in _OBJECTS else MooncakeBlobs
    full_url = _join({**_REDIS, **_OBJECTS}.get(scheme, scheme), parts.netloc + parts.path, query)
    try:
        blobs = driver(full_url, prefix, timeout=timeout, retries=retries, shown_url=shown_url)
    except ImportError as error:
        extra = "mooncake" if driver is MooncakeBlobs else "remote"
        raise StoreError(
            f"{scheme}:// needs a library that is not installed ({error}): pip install 'kamera-kv[{extra}]'"
        ) from error
    except KameraError:
        raise
    except Exception as error:  # the library may raise any class for a url it rejects
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise StoreError(f"cannot open {shown_url}: {reason}") from error
    return Remote(blobs, codec, tenant, cooldown)


class Breaker:
    """Circuit breaker of the calls of one ``kind``, with their counters and the last error.

    ``state`` is ``closed`` (calls may be made), ``failing`` (so they may, but the last one failed), ``open``
    (none may) or ``half-open`` (one may, which decides). ``clock`` returns seconds. Safe to use from several
    threads.
    """

    def __init__(
        self, kind: str, cooldown: float = COOLDOWN, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[str] = Counter()
        """``calls``, ``failures``, and ``skipped``: calls not made because the breaker was open."""
        self.last_error = ""
        self._kind = kind
        self._cooldown = cooldown
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opening_time = 0.0
        self._probing = self._down = False

    @property
    def state(self) -> str:
        """The present state."""
        if self._failures < FAILURES:
            return "failing" if self._down else "closed"
        return "half-open" if self._clock() - self._opening_time >= self._cooldown else "open"

    def call(self, blobs: Blobs, work: Callable[[], _T]) -> _T:
        """What a call to ``blobs`` returns. `RemoteUnavailable` if it fails, or where none is to be made."""
        if not self.allow():
            raise RemoteUnavailable(f"{blobs.url} is left alone for a while: {self.last_error}")
        try:
            answer = work()
        except blobs.errors as error:
            self.report_failure(blobs.url, error)
            raise RemoteUnavailable(f"{blobs.url} fails {self._kind}: {self.last_error}") from error
        except KameraError:  # an operation this kind of remote cannot do: not an outage
            self.report_success()
            raise
        except BaseException:
            self.report_failure()  # a probe must not stay under way for ever
            raise
        self.report_success(blobs.url)
        return answer

    def allow(self) -> bool:
        """True if the call may be made; its caller must `report_success` or `report_failure` afterwards."""
        with self._lock:
            state = self.state
            is_allowed = state in ("closed", "failing") or (state == "half-open" and not self._probing)
            self._probing = self._probing or (is_allowed and state == "half-open")
            self.counts["calls" if is_allowed else "skipped"] += 1
            return is_allowed

    def report_success(self, url: str = "") -> None:
        """Report that the remote answered, at ``url`` if it did what was asked."""
        with self._lock:
            self._failures, self._probing = 0, False
            news, self._down = self._down and bool(url), self._down and not url
        if news:
            logger.warning("remote %s serves %s again", url, self._kind)

    def report_failure(self, url: str = "", error: Exception | None = None) -> None:
        """Report that the remote did not answer; with ``error`` it is counted, and logged once."""
        with self._lock:
            self._failures, self._probing, self._opening_time = self._failures + 1, False, self._clock()
            if error is None:
                return
            self.counts["failures"] += 1
            self.last_error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            news, self._down = not self._down, True
        if news:
            logger.warning(
                "remote %s fails %s (%s): objects only it has are misses, uploads wait",
                url,
                self._kind,
                self.last_error,
            )


@dataclass(frozen=True)
class RemoteStats:
    """The remote tier since it was opened.

    ``reads`` and ``writes`` are the states of its circuit breakers: ``closed`` (calls work), ``failing``
    (the last call failed), ``open`` (no call is made) or ``half-open`` (the next call is a trial).
    ``refused``: objects found but rejected (damaged, foreign, or of another key or format). ``stored``:
    objects sent. ``calls``: calls made; ``failures``: those of them that failed; ``skipped``: calls not
    made because the remote was down. ``pending``: objects that wait to be sent.
    """

    url: str
    reads: str
    writes: str
    hits: int
    misses: int
    refused: int
    stored: int
    calls: int
    failures: int
    skipped: int
    last_error: str
    pending: int = 0


class Remote:
    """One tenant's objects in a remote; see `Directory`. Safe to use from several threads and machines.

    Every method raises `RemoteUnavailable` when the remote does not answer or refuses: at once, while it is
    known to be down.
    """

    def __init__(self, blobs: Blobs, codec: Codec, tenant: str, cooldown: float = COOLDOWN) -> None:
        self.url = blobs.url
        # nobody can be excluded: who pins looks afterwards whether the object is still there
        self.pins = Pins(alone=contextlib.nullcontext, load=self._load_pins, save=self._save_pins)
        """A blob each: every client that removes objects there honours them."""
        self.blobs = blobs
        self._reads, self._writes = Breaker("reads", cooldown), Breaker("writes", cooldown)
        self._codec = codec
        self._tenant = tenant
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._known: dict[str, tuple[str, ObjectInfo]] = {}  # by name, with the mark of the blob

    # -- blobs ---------------------------------------------------------------------------------

    def load(self, blob: str) -> bytes | None:
        """The bytes of a blob, unverified; None if there is none."""
        return self._reads.call(self.blobs, lambda: self.blobs.get(blob))

    def names_in(self, folder: str) -> list[str]:
        """The blobs of a folder."""
        return [name for name in self._marks(folder) if name.startswith(folder)]

    def put_blob(self, blob: str, data: bytes) -> None:
        """Store a blob."""
        self._writes.call(self.blobs, lambda: self.blobs.put(blob, data))

    def delete_blobs(self, blobs: Sequence[str]) -> None:
        """Remove blobs; absent ones are ignored."""
        self._writes.call(self.blobs, lambda: self.blobs.delete(blobs))

    def heads(self, blobs: Sequence[str], length: int) -> list[BlobHead | None]:
        """The first ``length`` bytes of each of these; None for one that is not there."""
        if not blobs:
            return []
        return self._reads.call(self.blobs, lambda: self.blobs.read_heads(blobs, length))

    def reach(self) -> None:
        """Make one request, to check that the remote answers."""
        self.heads([OBJECTS], 1)

    # -- objects -------------------------------------------------------------------------------

    def read(self, name: str) -> Held | None:
        """The object ``name``, verified, with its bytes; otherwise as `Directory.read`.

        Raises `ForeignKey` too, for a key that is no blob: then it stays where it is.
        """
        try:
            data = self.load(OBJECTS + name)
            if data is None:
                self._count("misses")
                return None
            found = self._codec.read(Source.of(data), name, f"{self.url} {OBJECTS}{name}")
        except ForeignKey:
            self._count("refused")
            raise
        except CorruptChunk as error:
            self._count("refused")
            raise type(error)(f"{error}; {self._set_aside(name, data or b'')}") from error
        except (StoreVersionError, WrongKey):
            self._count("refused")
            raise
        self._count("hits")
        return found._replace(data=data)

    def names(self) -> list[str]:
        """The names of the objects, sorted."""
        return sorted(filter(is_key, self._listed()))

    def strangers(self) -> list[str]:
        """One line for each key in the place of an object that is none."""
        names = sorted(name for name in self._listed() if not is_key(name))
        return [f"{self.url} {OBJECTS}{name}: no object's name: move it away" for name in names]

    def names_with_blob(self, names: Sequence[str]) -> set[str]:
        """Those of ``names`` that have a blob, unverified."""
        heads = self.heads([OBJECTS + name for name in names], 1)
        return {name for name, head in zip(names, heads, strict=True) if head is not None}

    def info(self, name: str) -> ObjectInfo | None:
        """The description of ``name`` by its header; None for a foreign key, too. Raises as `read`."""
        try:
            info = self._info(OBJECTS + name, self.heads([OBJECTS + name], FRONT)[0])
            return None if info is None or info.context.tenant != self._tenant else info
        except UNREADABLE:
            with contextlib.suppress(ForeignKey):
                self.read(name)
            return None

    def infos_of(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """The objects of these names; None for one that is absent, foreign or cannot be read."""
        return [None if isinstance(info, Exception) else info for info in self._fronts(names)]

    def look(self, names: Sequence[str]) -> dict[str, ObjectInfo | Exception | None]:
        """What `info` returns of each of these names, or raises; they are asked for at once."""
        found = dict[str, ObjectInfo | Exception | None](zip(names, self._fronts(names), strict=True))
        for name in [name for name, info in found.items() if isinstance(info, Exception)]:
            try:
                found[name] = self.info(name)  # sets it aside
            except RemoteUnavailable:
                found[name] = None
            except KameraError as error:
                found[name] = error
        return found

    def infos(self, *, afresh: bool = False) -> Iterator[ObjectInfo]:
        """The readable objects by name; a header is read again only when its blob has changed, or ``afresh``.

        If the service marks its blobs, a listing without changes reads no blob; if not, the first
        `MARK_BYTES` of all.
        """
        marks = self._listed()
        names = sorted(filter(is_key, marks))
        bare = [name for name in names if marks[name] is None]
        heads = self.heads([OBJECTS + name for name in bare], MARK_BYTES)
        marks |= {name: head and f"{head[1]} {head[0].hex()}" for name, head in zip(bare, heads, strict=True)}
        with self._lock:
            known = {} if afresh else {n: held for n, held in self._known.items() if held[0] == marks.get(n)}
        for i in range(0, len(names), _BATCH):
            new = [name for name in names[i : i + _BATCH] if name not in known]
            for name, info in zip(new, self.infos_of(new), strict=True):
                if info is not None:
                    known[name] = str(marks[name]), info
            yield from (known[name][1] for name in names[i : i + _BATCH] if name in known)
        with self._lock:
            self._known = dict(islice(known.items(), BOUND))

    def put(self, info: ObjectInfo, data: bytes) -> bool:
        """Store an object, whose file is ``data``; False if the one there was formed behind stronger KV.

        Of two machines that put at the same instant, the later one may not see the other's.
        """
        if info.formed is not None and outranks(GUARANTEES[0], info.formed):
            with contextlib.suppress(*UNREADABLE):
                held = self.info(info.key)
                if held is not None and outranks(held.formed, info.formed):
                    return False
        self.put_blob(OBJECTS + info.key, data)
        self._count("stored")
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; absent ones are ignored."""
        self.delete_blobs([OBJECTS + name for name in names])

    # -- quarantine ----------------------------------------------------------------------------

    def copies(self) -> list[Quarantined]:
        """All copies in quarantine, by name and time."""
        files = sorted(blob.removeprefix(QUARANTINE) for blob in self.names_in(QUARANTINE))
        files = [file for file in files if Quarantined.of(file, 0) is not None]
        heads = self.heads([QUARANTINE + file for file in files], 1)
        copies = (Quarantined.of(f, head[1]) for f, head in zip(files, heads, strict=True) if head)
        return [copy for copy in copies if copy is not None]

    def copy_info(self, file: str) -> ObjectInfo | None:
        """The description of a copy from its header; None if it cannot be read."""
        with contextlib.suppress(*UNREADABLE):
            return self._info(QUARANTINE + file, self.heads([QUARANTINE + file], FRONT)[0])
        return None

    def delete_copy(self, file: str) -> None:
        """Delete a copy in quarantine."""
        self.delete_blobs([QUARANTINE + file])

    def stats(self) -> RemoteStats:
        """Counters since it was opened, and its state."""
        reads, writes = self._reads, self._writes
        with self._lock:
            counts = Counter(self._counts)
        return RemoteStats(
            url=self.url,
            reads=reads.state,
            writes=writes.state,
            **{what: counts[what] for what in ("hits", "misses", "refused", "stored")},
            **{what: reads.counts[what] + writes.counts[what] for what in ("calls", "failures", "skipped")},
            last_error=reads.last_error or writes.last_error,
        )

    def close(self) -> None:
        """Close the connections."""
        self.blobs.close()

    # -- pins ----------------------------------------------------------------------------------

    def _load_pins(self) -> Pinned:
        pins, cap = dict[str, Pin](), None
        blobs = sorted(self.names_in(PINS))
        for blob, head in zip(blobs, self.heads(blobs, FRONT), strict=True):
            try:
                some, bound = ({}, None) if head is None else pins_of(head[0])
            except ValueError as error:
                raise StoreError(
                    f"pins {self.url} {blob}: {error}; if it is damaged, delete it and pin again: until then "
                    "nothing is removed"
                ) from error
            pins, cap = pins | some, cap if bound is None else bound
        return pins, cap

    def _save_pins(self, pins: dict[str, Pin], cap: int | None, changed: Sequence[str]) -> None:
        texts = {name: pins_text([pins[name]], None) for name in changed if name in pins}
        if "cap" in changed and cap is not None:
            texts["cap"] = pins_text([], cap)
        for name, text in texts.items():
            self.put_blob(PINS + name, text)
        if gone := [PINS + name for name in changed if name not in texts]:
            self.delete_blobs(gone)

    # -- inside --------------------------------------------------------------------------------

    def _marks(self, folder: str) -> Mapping[str, str | None]:
        return self._reads.call(self.blobs, lambda: self.blobs.marks(folder))

    def _listed(self) -> dict[str, str | None]:
        start, marks = len(OBJECTS), self._marks(OBJECTS)
        return {name[start:]: mark for name, mark in marks.items() if name.startswith(OBJECTS)}

    def _fronts(self, names: Sequence[str]) -> list[ObjectInfo | Exception | None]:
        """The objects of these names by their headers, None if absent or foreign; or what is wrong."""
        found: list[ObjectInfo | Exception | None] = []
        for name, front in zip(names, self.heads([OBJECTS + name for name in names], FRONT), strict=True):
            try:
                info = self._info(OBJECTS + name, front)
            except UNREADABLE as error:
                logger.warning("not listed: %s", error)
                found.append(error)
            else:
                found.append(None if info is None or info.context.tenant != self._tenant else info)
        return found

    def _info(self, blob: str, head: BlobHead | None) -> ObjectInfo | None:
        """The object in a blob whose name begins with its own, of any tenant. Raises as the codec."""
        if head is None:
            return None
        name = blob.rpartition("/")[2].partition(".")[0]
        size, front = head[1], Source.of(head[0])

        def read_into(start: int, view: memoryview) -> None:
            nonlocal front
            if start + len(view) > front.size:  # more of it is asked for only then
                more = self.heads([blob], start + len(view))[0]
                if more is not None and more[1] == size:
                    front = Source.of(more[0])
            front.read_into(start, view)

        return self._codec.read_info(Source(size, read_into), name, f"{self.url} {blob}")

    def _set_aside(self, name: str, data: bytes) -> str:
        """Move a damaged blob to quarantine. One that is put meanwhile may go with it, and is a miss then."""
        place = f"{QUARANTINE}{name}.{time.time_ns()}"
        try:
            self.put_blob(place, data)
            if self.load(OBJECTS + name) != data:
                self.delete_blobs([place])
                return "it was replaced meanwhile"
            self.delete([name])
        except RemoteUnavailable as error:
            return f"not set aside: {error}"
        logger.warning("damaged object %s of %s moved to %s", name, self.url, place)
        return f"moved to {place}"

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


class Uploads:
    """Names of objects that still have to reach the remote, and one thread that sends them.

    ``send`` uploads one object and raises `RemoteUnavailable` on failure: then the object keeps waiting,
    and the thread pauses for a random time below a bound that doubles (full jitter). The thread starts with
    the first name. Safe to use from several threads.
    """

    _PAUSES = (0.1, 10.0)  # seconds: the first, the longest

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._versions: OrderedDict[str, int] = OrderedDict()  # to the count of its last adding
        self._last_version = self._failures = 0
        self._failed_in_a_row = 0
        self._hurry = self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, name: str) -> None:
        """Send ``name``; if it is being sent now, send it again."""
        with self._changed:
            self._last_version += 1
            self._versions[name] = self._last_version
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="kamera-uploads", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def discard(self, name: str) -> None:
        """Drop ``name`` from the waiting names."""
        with self._changed:
            self._versions.pop(name, None)
            self._changed.notify_all()

    def __contains__(self, name: object) -> bool:
        """True if the object ``name`` still has to reach the remote."""
        return name in self._versions

    def names(self) -> tuple[str, ...]:
        """Names of the objects that still have to reach the remote."""
        with self._changed:
            return tuple(self._versions)

    def flush(self, timeout: float | None, *, patient: bool = True) -> tuple[str, ...]:
        """Send what waits; return what is left after ``timeout`` seconds, or a failure unless ``patient``."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            old_failures = self._failures
            self._changed.wait_for(
                lambda: not self._versions or not (patient or self._failures == old_failures), timeout
            )
            return tuple(self._versions)

    def close(self) -> None:
        """Stop sending, after the object under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._versions or self._closing)
                if self._closing:
                    return
                name, version = next(iter(self._versions.items()))
            is_done = True
            try:
                self._send(name)
            except CorruptChunk as error:  # damaged here and quarantined: there is nothing to send
                logger.warning("not uploaded: %s", error)
            except RemoteUnavailable:
                is_done = False
            except Exception:  # the thread must survive: other objects wait behind this one
                logger.exception("upload of %s failed", name)
                is_done = False
            self._end(name, version, is_done)

    def _end(self, name: str, version: int, is_done: bool) -> None:
        with self._changed:
            self._failed_in_a_row = 0 if is_done else self._failed_in_a_row + 1
            self._failures += not is_done
            if self._versions.get(name) == version and is_done:
                del self._versions[name]
            elif self._versions.get(name) == version:
                self._versions.move_to_end(name)  # a refused object must not block the others
            self._changed.notify_all()
            if not is_done:
                first, longest = self._PAUSES
                bound = min(longest, first * 2**self._failed_in_a_row)
                self._changed.wait_for(lambda: self._hurry or self._closing, random.uniform(0, bound))
                self._hurry = False


def _batches(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def _join(scheme: str, place: str, query: dict[str, str]) -> str:
    return f"{scheme}://{place}{'?' if query else ''}{urlencode(query)}"
