"""A directory of a pool's saved sessions, written by a thread behind the answers.

Each session has a directory of its own, named by a digest of tenant and id, in the format of
`ChatSession.save`. A session's directory is locked while it is written, read or removed, so several processes
may use one directory of sessions. A save replaces only what it goes on from: of two processes that continue
one session at once, the first to save stays on the disk, and the other's saves are refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from kamera import files, forks
from kamera.edits import name_of
from kamera.errors import CorruptChunk, IncompatibleChunk, KameraError, StoreError, quote
from kamera.files import user_path
from kamera.ops import digest
from kamera.sessions.anchors import Anchors, PastTurn, Turns
from kamera.sessions.chat import ChatSession, open_session
from kamera.sessions.layout import Manner, laxest_treatment
from kamera.sessions.save import (
    SESSION,
    Document,
    SavedTurn,
    load_session,
    load_turn,
    load_turns,
    lock_folder,
    read_document,
    save_session,
    save_turn,
)
from kamera.sessions.table import Candidate

_log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]

_NOTED = 8
"""Changes of a session that may have been noted since its last save but one."""

_NO_MESSAGES = SavedTurn(None, (), (), False)
"""A turn in a header."""


class SavedSessions:
    """The sessions saved under ``root``. Threads may share one.

    `save` returns before the session is on the disk, but not before the session's save before it is: a
    process that is killed loses the KV of a session's last turn at most, whose messages are noted before it
    is acknowledged. A clean exit completes all saves. A forked child saves its own; those under way at the
    fork are its parent's.

    Over ``limit`` bytes the sessions saved longest ago are removed; the latest save stays, whatever its size.
    """

    def __init__(self, root: str | Path, limit: int | None = None) -> None:
        self.root = user_path(root)
        self.limit = limit
        self._lock = forks.Lock()
        self._headers: dict[str, tuple[Stamp, Document | None]] = {}  # without messages
        self._start()
        forks.call_in_child(self, SavedSessions._start)

    def _start(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kamera-sessions")
        self._pending: dict[Path, Future[None]] = {}
        self._failures: list[BaseException] = []
        self.counts = Counter[tuple[str, str]]()  # its part of `PoolMetrics`, by tenant and name

    def save(self, tenant: str, name: str, session: ChatSession, anchors: Anchors) -> None:
        """Save a session soon. It must not be written to any more (`ChatSession.fork`)."""
        path = self._path(tenant, name)
        self._settle(path)
        with self._lock:
            self._pending = {p: future for p, future in self._pending.items() if not future.done()}
            self._pending[path] = self._thread.submit(self._write, path, name, session, anchors)

    def is_overtaken(self, tenant: str, name: str, changes: Sequence[str]) -> bool:
        """True if the saved session has all of ``changes``, and others after them."""
        path, last = self._path(tenant, name), changes[-1] if changes else None
        with self._lock:
            future = self._pending.get(path)
        if last is None or (future is not None and not future.done()):
            return False
        header = self._header_in(path.name)
        return header is not None and last in header.changes[:-1]

    def flush(self) -> None:
        """Wait until all saves are over; raises the first error of those that failed since the last flush.

        SessionConflict for one that was continued elsewhere: it is saved, under another id.
        """
        with self._lock:
            futures = list(self._pending.values())
        for future in futures:
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
        return sorted(h.id for h in self._read_headers() if h.tenant == tenant and h.id is not None)

    def candidates(self, anchors: Anchors, manner: Manner) -> dict[str, Candidate]:
        """Saved sessions of the ``manner``'s tools, by id, that `load` would give a window."""
        store, kind = anchors.store, manner.kind
        own = (anchors.backbone.fingerprint, store.tenant, anchors.policy, anchors.max_tokens, kind)
        sessions = {}
        for header in self._read_headers():
            same = (header.fingerprint, header.tenant, header.policy, header.max_tokens, header.kind) == own
            if same and header.id is not None and header.window is not None:
                on_leave = laxest_treatment(manner.mode, header.window.minimum)
                sessions[header.id] = Candidate(header.window.layout, header.window.guarantee, on_leave)
        return sessions

    def load(self, name: str, anchors: Anchors, manner: Manner) -> ChatSession | None:
        """A saved session, which answers in a pool's ``manner`` with its own tools; None if there is none.

        A window that is damaged or another session's, or was made under another policy or limit of tokens, is
        left out: the next turn prefills the history, and answers the same. Raises CorruptChunk for a damaged
        history or that of another id, IncompatibleChunk for another model's, StoreVersionError, StoreError.
        """
        path = self._path(anchors.store.tenant, name)
        self._settle(path)
        if not os.path.lexists(path / SESSION.name):
            return None
        try:
            with files.lock_path(path):
                document = read_document(path, anchors.store, name)
                whole = (document.policy, document.max_tokens) == (anchors.policy, anchors.max_tokens)
                try:
                    state = load_session(path, document, anchors, messages_only=not whole)
                except IncompatibleChunk:
                    raise
                except KameraError as error:
                    _log.warning("the window of saved session %s is left out: %s", path.name, error)
                    state = load_session(path, document, anchors, messages_only=True)
        except OSError as error:
            raise StoreError(f"the session saved at {str(path)!r} cannot be read: {error}") from None
        own = None if manner.edit_policy is None else name_of(manner.edit_policy)
        if document.edit_policy != own:
            _log.warning(
                "saved session %s goes on under edit policy %s of its pool; it was saved under %s",
                *(quote(name), own, document.edit_policy),
            )
        return open_session(anchors, replace(manner, tools=document.tools), state)

    def note(self, turn_id: str, anchors: Anchors) -> None:
        """Write a turn down, before it is acknowledged; it stays until the save of its session has it."""
        try:
            save_turn(self._noted(turn_id, anchors), turn_id, anchors)
        except Exception as error:  # whatever it is, the conversation goes on
            _log.warning("turn %s is not written down: %s", turn_id, error)

    def find_turn(self, turn_id: str, anchors: Anchors) -> Turns:
        """A turn that was noted, or of any saved session, with those before it; {} if none can be read."""
        path, turns = self._noted(turn_id, anchors), dict[str, PastTurn]()
        if path.is_dir():
            try:
                turn = load_turn(path, turn_id, anchors)
            except KameraError as error:
                _log.warning("turn %s cannot be read: %s", turn_id, error)
            else:
                before = {} if turn.previous_id is None else self.find_turn(turn.previous_id, anchors)
                if turn.previous_id is None or before:
                    turns = {**before, turn_id: turn}
        return turns or self._find_saved(turn_id, anchors)

    def _find_saved(self, turn_id: str, anchors: Anchors) -> Turns:
        for header in self._headers_of(turn_id, anchors):
            path = self._path(anchors.store.tenant, header.id or "")
            try:
                with files.lock_path(path):
                    return load_turns(path, read_document(path, anchors.store, header.id))[1]
            except (KameraError, OSError) as error:
                _log.warning("a turn of saved session %s cannot be read: %s", path.name, error)
        return {}

    def names_of(self, turn_id: str, anchors: Anchors) -> list[str]:
        """Ids of the saved sessions that have a turn, first those whose last one it is."""
        headers = self._headers_of(turn_id, anchors)
        return [h.id for h in sorted(headers, key=lambda h: h.last != turn_id) if h.id is not None]

    # -- inside --------------------------------------------------------------------------------

    def _headers_of(self, turn_id: str, anchors: Anchors) -> list[Document]:
        own = (anchors.backbone.fingerprint, anchors.store.tenant)
        headers = [h for h in self._read_headers() if (h.fingerprint, h.tenant) == own]
        return [header for header in headers if turn_id in header.turns]

    def _noted(self, turn_id: str, anchors: Anchors) -> Path:
        """The directory of a turn that is written down, beside those of sessions."""
        name = digest("kamera.turn.v1", anchors.store.tenant, turn_id)
        return self.root.with_name(f"{self.root.name}-turns") / name

    def _path(self, tenant: str, name: str) -> Path:
        return self.root / digest("kamera.session.v1", tenant, name)

    def _settle(self, path: Path) -> None:
        """Wait for the save of ``path`` that is under way."""
        with self._lock:
            future = self._pending.get(path)
        if future is not None:
            future.result()

    def _write(self, path: Path, name: str, session: ChatSession, anchors: Anchors) -> None:
        try:
            with lock_folder(path):
                document = save_session(path, session.state, anchors, session.manner, name, strict=True)
                self._note_header(path, _stamp(path / SESSION.name), document)
            self._trim(path)
            for turn_id in session.state.changes[-_NOTED:]:
                if (noted := self._noted(turn_id, anchors)).is_dir():
                    _remove(noted)
        except Exception as error:  # whatever it is, the conversation goes on
            _log.warning("session %s is not saved: %s", name, error)
            with self._lock:
                self._failures.append(error)
                self.counts[anchors.store.tenant, "unsaved"] += 1
        else:
            with self._lock:
                self.counts[anchors.store.tenant, "saved"] += 1

    def _trim(self, latest: Path) -> None:
        """Remove sessions over the limit, those saved longest ago first; ``latest`` stays."""
        if self.limit is None:
            return
        times_and_sizes = {}
        for where in self.root.glob(f"*/{SESSION.name}"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it, here and below
                times_and_sizes[where.parent] = _stamp(where)[2], _size(where.parent)
        total = sum(size for _, size in times_and_sizes.values())
        for path, (_, size) in sorted(times_and_sizes.items(), key=itemgetter(1)):
            if total <= self.limit:
                break
            if path != latest:
                header = self._header_in(path.name)
                with contextlib.suppress(FileNotFoundError):
                    _remove(path)
                    with self._lock:
                        self.counts["" if header is None else header.tenant, "evicted_saved"] += 1
                total -= size

    def _read_headers(self) -> list[Document]:
        """Headers of all readable sessions; a document is parsed again only if its file has changed."""
        if not self.root.is_dir():
            return []
        names = os.listdir(self.root)
        headers = [self._header_in(folder) for folder in names]
        with self._lock:
            self._headers = {folder: self._headers[folder] for folder in names if folder in self._headers}
        return [header for header in headers if header is not None]

    def _header_in(self, folder: str) -> Document | None:
        """The header of one directory; None if no session can be read there, which is logged once."""
        path, header = self.root / folder, None
        try:
            stamp = _stamp(path / SESSION.name)
        except OSError:
            return None
        old_entry = self._headers.get(folder)
        if old_entry is not None and old_entry[0] == stamp:
            return old_entry[1]
        try:
            header = read_document(path)
            if header.id is not None and self._path(header.tenant, header.id) != path:
                raise CorruptChunk(f"{str(path)!r} is not where session {header.id!r} belongs: remove it")
        except KameraError as error:  # it is named when its session is asked for
            _log.warning("a saved session is passed over: %s", error)
            header = None
        return self._note_header(path, stamp, header)

    def _note_header(self, path: Path, stamp: Stamp, document: Document | None) -> Document | None:
        header = None
        if document is not None:
            turns = dict.fromkeys(document.turns, _NO_MESSAGES)
            header = replace(document, said=[], messages=(), decays=(), turns=turns, ids=None)
        with self._lock:
            self._headers[path.name] = (stamp, header)
        return header


def check_saving(save: str | Path | None, limit: int | None) -> None:
    """Raise ValueError for a ``limit`` of bytes of no directory, or of none."""
    if limit is not None and (save is None or limit < 1):
        raise ValueError(f"max_saved_bytes={limit} of save={quote(save)}: 1 byte or more, of a directory")


def _remove(path: Path) -> None:
    with files.lock_path(path):
        (path / SESSION.name).unlink(missing_ok=True)  # first: without it there is no session
        shutil.rmtree(path)


def _size(path: Path) -> int:
    """Bytes of a directory's files, but of those that somebody writes."""
    whole = (file for file in path.rglob("*") if not file.name.startswith(files.ASIDE))
    return sum(file.stat().st_size for file in whole if file.is_file())


def _stamp(where: Path) -> Stamp:
    """What changes with a file. Raises OSError."""
    stat = os.stat(where, follow_symlinks=False)
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)
