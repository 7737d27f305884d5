"""A directory of a pool's saved sessions, written by a thread behind the answers.

Each session has a directory of its own, named by a digest of tenant and id, in the format of
`ChatSession.save`. A session's directory is locked while it is written, read or removed, so several processes
may use one directory of sessions; of two that continue the same session, the last to save stays.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kamera.content import Conversations, tool_schema
from kamera.errors import IncompatibleChunk, KameraError
from kamera.ops import digest
from kamera.sessions.anchors import Anchors
from kamera.sessions.chat import ChatSession
from kamera.sessions.layout import Layout
from kamera.sessions.match import Candidate
from kamera.sessions.modes import SessionMode, laxest
from kamera.sessions.persist import FILE, layout_of, load_session, read_session
from kamera.store import folder_locked
from kamera.window import Guarantee, ReusePolicy

_log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class _Header:
    """What a saved session's document says of it, for choices that load no window.

    ``made_by``: fingerprint, policy and limit of tokens of its window. ``held``: of one with a window, its
    layout, the weakest guarantee and the least that is served.
    """

    name: str | None
    tenant: str
    tools: str
    made_by: tuple[str, ReusePolicy | None, int | None]
    held: tuple[Layout, Guarantee, Guarantee] | None


class SavedSessions:
    """The sessions saved under ``root``. Threads may share one.

    `save` returns before the session is on the disk, but not before the session's save before it is: a
    process that is killed loses a session's last turn at most. A clean exit completes all saves.

    Over ``limit`` bytes the sessions saved longest ago are removed; the latest save stays, whatever its size.
    """

    def __init__(self, root: str | Path, limit: int | None = None) -> None:
        self.root = Path(root)
        self.limit = limit
        self._lock = threading.Lock()
        self._headers: dict[str, tuple[Stamp, _Header | None]] = {}
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kamera-sessions")
        self._pending: dict[Path, Future[None]] = {}
        self._failures: list[BaseException] = []
        self.saved = self.unsaved = self.evicted = 0

    def save(self, tenant: str, name: str, session: ChatSession) -> None:
        """Save a session soon; it must not be written to any more (`ChatSession.fork`)."""
        path = self._path(tenant, name)
        self._settle(path)
        with self._lock:
            if self._process != os.getpid():  # a forked child has none of its parent's threads
                self._start()
            self._pending = {p: future for p, future in self._pending.items() if not future.done()}
            self._pending[path] = self._thread.submit(self._write, path, name, session)

    def flush(self) -> None:
        """Wait until all saves are over; raises the first error of those that failed since the last flush."""
        with self._lock:
            waiting = list(self._pending.values())
        for future in waiting:
            future.result()
        with self._lock:
            failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def remove(self, tenant: str, name: str) -> bool:
        """Remove a saved session; True if there was one. Raises OSError."""
        path = self._path(tenant, name)
        self._settle(path)
        if not path.is_dir():
            return False
        _remove(path)
        return True

    def names(self, tenant: str) -> list[str]:
        """Ids of a tenant's sessions on the disk, in order."""
        return sorted(h.name for h in self._known() if h.tenant == tenant and h.name is not None)

    def candidates(self, anchors: Anchors, mode: SessionMode, kind: str) -> dict[str, Candidate]:
        """Saved sessions by id that `load` would give a window; ``kind`` is the digest of their tools."""
        made_by = (anchors.backbone.fingerprint, anchors.policy, anchors.max_tokens)
        wanted = (anchors.store.tenant, kind, made_by)
        found = {}
        for header in self._known():
            own = (header.tenant, header.tools, header.made_by)
            if own == wanted and header.name is not None and header.held is not None:
                layout, guarantee, minimum = header.held
                found[header.name] = Candidate(layout, guarantee, laxest(mode, minimum))
        return found

    def load(
        self,
        name: str,
        anchors: Anchors,
        conversations: Conversations,
        **settings: Any,
    ) -> ChatSession | None:
        """A saved session under a pool's ``settings`` (those of `ChatSession.among`); None if there is none.

        A window that is damaged, or was made under another policy or limit of tokens, is left out: the next
        turn prefills the history, and answers the same. Raises CorruptChunk for a damaged history,
        IncompatibleChunk for another model's, StoreVersionError, StoreError.
        """
        path = self._path(anchors.store.tenant, name)
        self._settle(path)
        if not (path / FILE).is_file():
            return None
        with folder_locked(path):
            try:
                _, state, policy, max_tokens = load_session(path, anchors.backbone, anchors.store)
                whole = (policy, max_tokens) == (anchors.policy, anchors.max_tokens)
            except IncompatibleChunk:
                raise
            except KameraError as error:
                _log.warning("the window of saved session %s is left out: %s", path.name, error)
                whole = False
            if not whole:
                _, state, _, _ = load_session(path, anchors.backbone, anchors.store, messages_only=True)
        return ChatSession.among(anchors, conversations, state=state, **settings)

    # -- inside --------------------------------------------------------------------------------

    def _path(self, tenant: str, name: str) -> Path:
        return self.root / digest("kamera.session.v1", tenant, name)

    def _settle(self, path: Path) -> None:
        """Wait for the save of ``path`` that is under way."""
        with self._lock:
            future = self._pending.get(path) if self._process == os.getpid() else None
        if future is not None:
            future.result()

    def _write(self, path: Path, name: str, session: ChatSession) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            with folder_locked(path):
                session.save(path, session_id=name)
            self._trim(path)
        except Exception as error:  # whatever it is, the conversation goes on
            _log.warning("session %s is not saved: %s", path.name, error)
            with self._lock:
                self._failures.append(error)
                self.unsaved += 1
        else:
            with self._lock:
                self.saved += 1

    def _trim(self, latest: Path) -> None:
        """Remove sessions over the limit, those saved longest ago first; ``latest`` stays."""
        if self.limit is None:
            return
        found = [(where.stat().st_mtime_ns, where.parent) for where in self.root.glob(f"*/{FILE}")]
        sizes = {path: _size(path) for _, path in found}
        for _, path in sorted(found):
            if sum(sizes.values()) <= self.limit:
                break
            if path != latest:
                _remove(path)
                del sizes[path]
                with self._lock:
                    self.evicted += 1

    def _known(self) -> list[_Header]:
        """Headers of all readable sessions; a document is parsed again only if its file has changed."""
        found: dict[str, tuple[Stamp, _Header | None]] = {}
        if not self.root.is_dir():
            return []
        for folder in os.listdir(self.root):
            where = self.root / folder / FILE
            try:
                stat = where.stat()
            except OSError:
                continue
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            before = self._headers.get(folder)
            found[folder] = before if before is not None and before[0] == stamp else (stamp, _header(where))
        with self._lock:
            self._headers = found
        return [header for _, header in found.values() if header is not None]


def tools_digest(tools: Sequence[Any] | None) -> str:
    """A digest of tools as the template sees them; the same in every process."""
    seen = None if tools is None else [tool_schema(tool) for tool in tools]
    return digest("kamera.pool.tools.v1", json.dumps(seen, default=repr))


def _remove(path: Path) -> None:
    with folder_locked(path):
        (path / FILE).unlink(missing_ok=True)  # first: without it there is no session
        shutil.rmtree(path)


def _size(path: Path) -> int:
    """Bytes of a directory's files."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _header(where: Path) -> _Header | None:
    """None for a document that cannot be read: it is named when its session is asked for."""
    try:
        document = read_session(where)
    except KameraError:
        return None
    held = None
    if document["window"] is not None:
        held = layout_of(document["layout"]), document["guarantee"], document["minimum"]
    policy = None if document["policy"] is None else ReusePolicy(**document["policy"])
    made_by = document["fingerprint"], policy, document["max_tokens"]
    return _Header(document["id"], document["tenant"], tools_digest(document["tools"]), made_by, held)
