"""Contexts in which an audit found wrong KV: nothing stored under them is served again.

A context is withheld as a whole, since what made one object wrong (a model that was changed unseen, a
foreign object under the same key) may have made any of them. It stays withheld for every process that opens
the store, until `Withheld.release`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from kamera import forks
from kamera.files import publish_file
from kamera.ops import digest
from kamera.store.codec import Codec
from kamera.store.keys import Context

logger = logging.getLogger(__name__)

FOLDER = "withheld"


class Withheld:
    """Reasons by context: in memory, and in a folder of ``root`` if given. Safe from several threads.

    A file that cannot be written costs a warning; one that cannot be read withholds.
    """

    def __init__(self, root: Path | None, codec: Codec) -> None:
        self._folder = None if root is None else root / FOLDER
        self._codec = codec
        self._lock = forks.Lock()
        self._reasons: dict[str, str] = {}

    def add(self, context: Context, reason: str) -> None:
        """Withhold a context for ``reason``, one line; the first reason stays."""
        name = _name(context)
        with self._lock:
            if name in self._reasons:
                return
            self._reasons[name] = reason
            self._write(name, reason)

    def reason(self, context: Context) -> str | None:
        """The reason for which a context is withheld in this process; None if it is not. Reads no file."""
        return self._reasons.get(_name(context))

    def read(self, context: Context) -> str | None:
        """`reason`, or that which another process has written."""
        name = _name(context)
        with self._lock:
            if name not in self._reasons and self._folder is not None:
                reason = self._read(name)
                if reason is not None:
                    self._reasons[name] = reason
            return self._reasons.get(name)

    def release(self, context: Context) -> None:
        """Serve the objects of a context again. Raises `OSError` if its file cannot be removed."""
        name = _name(context)
        with self._lock:
            if self._folder is not None:
                self._path(name).unlink(missing_ok=True)
            self._reasons.pop(name, None)

    # -- inside --------------------------------------------------------------------------------

    def _read(self, name: str) -> str | None:
        try:
            note = json.loads(self._codec.open_id(self._path(name).read_text(encoding="utf-8")))
            return str(note["reason"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            return f"the note of an audit cannot be read ({error})"

    def _write(self, name: str, reason: str) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with publish_file(self._path(name)) as file:
                file.write(self._codec.seal_id(json.dumps({"reason": reason})).encode())
        except OSError as error:
            logger.warning("a withheld context is withheld in this process only: %s", error)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / self._codec.name(name)


def _name(context: Context) -> str:
    return digest("kamera.withheld.v1", context.fingerprint, context.anchor, context.tenant, context.kv)
