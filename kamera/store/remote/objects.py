"""Blobs in an object store (S3, Google Cloud Storage) or on a shared file system, through obstore."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError, PreconditionError
from obstore.store import LocalStore, MemoryStore, S3Store, from_url

from kamera.errors import StoreError
from kamera.files import lock_path
from kamera.ops import digest
from kamera.store.remote.blobs import BlobHead, refuse_child

_WORKERS = 8  # concurrent look-ups while listing
_NO_PATH = re.compile(r'Path "([^"]*)"')
_TAKEN = (AlreadyExistsError, PreconditionError)  # the condition of a write did not hold


class ObjectBlobs:
    """Blobs under ``prefix``; see `Blobs`. ``store`` is one of `obstore.store`.

    An object store has no conditional deletion, so `replace` by nothing leaves a gap of one round trip in
    which a blob that another process wrote meanwhile is deleted: that is a miss, never wrong data. In files
    (``locks``: a folder for locks) the writers of a blob exclude each other by `flock` instead.
    """

    errors: tuple[type[Exception], ...] = (BaseError, OSError, ValueError)

    def __init__(self, store: Any, prefix: str, *, shown_url: str, locks: Path | None = None) -> None:
        refuse_child("an object store", shown_url)
        self._locks = locks
        self.url = shown_url
        self._store = store
        self._prefix = prefix
        self._proving = threading.Lock()
        self._is_proven = False
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="kamera-heads")

    @classmethod
    def open(cls, url: str, prefix: str, *, timeout: float, retries: int, shown_url: str) -> ObjectBlobs:
        """The store at ``s3://``, ``gs://`` (credentials from the environment), ``file://`` or ``memory://``.

        ``timeout`` (seconds) bounds the wait for an answer, ``retries`` the repetitions of a failed request.
        """
        refuse_child("an object store", shown_url)
        parts = urlsplit(url)
        if parts.scheme == "memory":
            return cls(MemoryStore(), prefix, shown_url=shown_url)
        if parts.scheme == "file":
            root = Path(unquote(parts.path))
            locks = root / "locks"
            locks.mkdir(parents=True, exist_ok=True)
            return cls(LocalStore(root), prefix, shown_url=shown_url, locks=locks)
        store = from_url(
            url,
            client_options={
                "connect_timeout": timedelta(seconds=timeout),
                "read_timeout": timedelta(seconds=timeout),
                # options given here replace the environment's
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=timeout * (retries + 1)),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(milliseconds=500),
                    "base": 2,
                },
            },
        )
        return cls(store, prefix, shown_url=shown_url)

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, self._path(name)).bytes())
        except FileNotFoundError:
            return None

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        """See `Blobs`; several at once."""
        return list(self._pool.map(lambda name: self._head(name, length), names))

    def put(self, name: str, data: bytes) -> None:
        with self._alone(name):
            obstore.put(self._store, self._path(name), data)

    def replace(self, name: str, data: bytes | None, expected: bytes | None) -> bool:
        """See `Blobs`, and the class for its limitation."""
        path = self._path(name)
        mode: Any = "create"
        with self._alone(name) as mine:
            try:
                if expected is not None:
                    answer = obstore.get(self._store, path)
                    meta: Mapping[str, Any] = dict(answer.meta)
                    if bytes(answer.bytes()) != expected:
                        return False
                    tags = {what: meta[what] for what in ("e_tag", "version") if meta.get(what)}
                    mode = "overwrite" if mine else tags
                if data is None:
                    obstore.delete(self._store, path)
                else:
                    self._prove_conditions()
                    obstore.put(self._store, path, data, mode=mode)
            except (FileNotFoundError, *_TAKEN):
                return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`; many in one request if the service supports it."""
        if isinstance(self._store, S3Store):
            obstore.delete(self._store, [self._path(name) for name in names])
        else:  # they have no bulk deletion, and fail on absent objects
            list(self._pool.map(self._remove, names))

    def marks(self, folder: str) -> Mapping[str, str | None]:
        """See `Blobs`; a mark is the entity tag.

        The library fails on a whole page of names if one is not a valid path (``..``, an empty part). Names
        deeper in the folder can be rolled up, and those sorted before all of ours skipped.
        """
        folder_path = (self._prefix + folder).rstrip("/")
        start = len(self._prefix)

        def flat(offset: str | None = None) -> dict[str, str | None]:
            chunks = obstore.list(self._store, folder_path, offset=offset, chunk_size=1000)
            return {blob["path"][start:]: blob["e_tag"] for chunk in chunks for blob in chunk}

        def roll_up() -> dict[str, str | None]:
            listing = obstore.list_with_delimiter(self._store, folder_path)
            names = {str(one["path"])[start:]: one["e_tag"] for one in listing["objects"]}
            return names | {f"{prefix[start:]}/": None for prefix in listing["common_prefixes"]}

        strange: dict[str, str | None] = {}
        for way in (flat, roll_up, lambda: flat(f"{folder_path}/0")):
            try:
                return way() | strange
            except InvalidPathError as error:
                match = _NO_PATH.search(str(error))
                path = str(error).splitlines()[0] if match is None else match.group(1)
                strange[folder + path.partition(self._prefix + folder)[2] if folder in path else path] = None
        raise StoreError(
            f"{self.url} cannot be listed, its library takes {' and '.join(map(repr, strange))} for none: "
            "delete them with the service's own tools"
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _head(self, name: str, length: int) -> BlobHead | None:
        path = self._path(name)
        try:
            try:
                answer = obstore.get(self._store, path, options={"range": (0, length)})
                return BlobHead(bytes(answer.bytes()), int(answer.meta["size"]))
            except BaseError:  # a range of an empty blob cannot be requested
                if obstore.head(self._store, path)["size"] != 0:
                    raise
                return BlobHead(b"", 0)
        except FileNotFoundError:
            return None

    def _remove(self, name: str) -> None:
        with self._alone(name), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, self._path(name))

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[bool]:
        """In files, which nothing compares and replaces, exclude other writers of ``name``: True then."""
        if self._locks is None:
            yield False
            return
        place = self._locks / digest(name)[:2]
        with lock_path(place, flags=os.O_RDWR | os.O_CREAT | os.O_CLOEXEC):
            yield True

    def _prove_conditions(self) -> None:
        """Check that unmet conditions are refused before relying on any: some services ignore them."""
        with self._proving:
            if self._is_proven or self._locks is not None:
                return
            path = self._path(f"probe/{secrets.token_hex(16)}")
            obstore.put(self._store, path, b"1")
            try:
                modes: tuple[Any, ...] = ("create", {"e_tag": '"0123456789abcdef0123456789abcdef"'})
                for mode in modes:
                    with contextlib.suppress(*_TAKEN):
                        obstore.put(self._store, path, b"2", mode=mode)
                        raise StoreError(
                            f"{self.url} replaces a blob although it was told on which condition (If-Match, "
                            "If-None-Match): nothing can be exchanged there while others may write; export "
                            "it, and import it elsewhere"
                        )
            finally:
                obstore.delete(self._store, path)
            self._is_proven = True

    def _path(self, name: str) -> str:
        return self._prefix + name
