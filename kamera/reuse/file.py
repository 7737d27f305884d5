"""A content index in a file that several processes share: a log of the additions of each prompt."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from kamera.errors import CorruptIndex, ForeignIndex
from kamera.reuse import frames
from kamera.reuse.index import ContentIndex, Found
from kamera.reuse.prompt import Prompt
from kamera.reuse.restored import stored_prompts
from kamera.reuse.rules import CutRule
from kamera.reuse.scope import Scope
from kamera.store import ChunkStore


class IndexFile:
    """A `ContentIndex` that appends its additions to a file and reads those of other processes.

    Appending locks the file; reading does not. A process killed during an append leaves an unfinished frame:
    readers stop before it, the next writer truncates it. The file holds token ids unencrypted and only its
    owner can read it (mode 0600). Not thread-safe.
    """

    def __init__(self, path: str | Path, scope: Scope, rule: CutRule) -> None:
        """Open the index at ``path``; create it if there is none.

        Raises `ForeignIndex` for another model, tokenizer, tenant or rule, `CorruptIndex` for a damaged file,
        which stays unchanged. `rebuild` replaces it.
        """
        self._path = Path(path)
        self._scope = scope
        self._rule = rule
        self._file = -1
        self._digest = frames.FIRST
        self._open()

    @classmethod
    def rebuild(
        cls, path: str | Path, scope: Scope, rule: CutRule, prompts: Iterable[Prompt] | ChunkStore
    ) -> IndexFile:
        """Replace the file at ``path`` by an index of ``prompts`` alone, or of those that a store tells of.

        Other processes switch to it at their next refresh. Raises as `stored_prompts` for a store; the file
        stays then.
        """
        given = stored_prompts(prompts, scope) if isinstance(prompts, ChunkStore) else prompts
        target = Path(path)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
        os.close(handle)
        try:
            os.unlink(name)
            with cls(name, scope, rule) as fresh:
                for prompt in given:
                    fresh.add(prompt)
            os.replace(name, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        return cls(target, scope, rule)

    def __enter__(self) -> IndexFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def index(self) -> ContentIndex:
        """The index up to the last refresh."""
        return self._index

    def find(self, prompt: Prompt) -> Found:
        """As `ContentIndex.find`, after `refresh`."""
        self.refresh()
        return self._index.find(prompt)

    def add(self, prompt: Prompt) -> int:
        """As `ContentIndex.add`, for every process that shares the file."""
        with self._locked():
            known = len(self._index)
            record = self._index.record_of(prompt)
            if record.lengths:
                self._append(frames.record_bytes(record))
                self._index.apply(record)
            return len(self._index) - known

    def refresh(self) -> None:
        """Read the additions of other processes. Raises `CorruptIndex` as on opening and keeps `index`."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        own = os.fstat(self._file)
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            self._open()
            return
        data = memoryview(os.pread(self._file, max(0, own.st_size - self._end), self._end))
        while (found := frames.next_frame(data, self._digest, str(self._path))) is not None:
            payload, size, digest = found
            if self._end == 0:
                self._check(frames.header_of(payload, str(self._path)))
            else:
                self._take(payload)
            self._end += size
            self._digest = digest
            data = data[size:]

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        self.close()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._index = ContentIndex(self._scope, self._rule)
        self._end = 0
        self._digest = frames.FIRST
        try:
            self.refresh()
            if self._end == 0:
                with self._locked():
                    pass
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock with the file fully read, an unfinished frame truncated and the header written."""
        while True:
            handle = self._file
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                self.refresh()
                if self._file != handle:  # the file was replaced before it was locked
                    continue
                os.ftruncate(handle, self._end)
                if self._end == 0:
                    self._append(frames.header_bytes(self._facts()))
                yield
                return
            finally:
                if self._file == handle:
                    fcntl.flock(handle, fcntl.LOCK_UN)

    def _append(self, payload: bytes) -> None:
        data, digest = frames.frame(payload, self._digest)
        written = os.pwrite(self._file, data, self._end)
        if written != len(data):
            raise OSError(f"{self._path}: {written} of {len(data)} bytes written")
        self._end += len(data)
        self._digest = digest

    def _take(self, payload: bytes) -> None:
        try:
            self._index.apply(frames.record_of(payload, str(self._path)))
        except ValueError as error:
            raise CorruptIndex(f"{self._path}: {error}: rebuild the index with IndexFile.rebuild") from None

    def _facts(self) -> dict[str, object]:
        return {**self._scope.digests, "rule": self._rule.digest, "cut": self._rule.to_info()}

    def _check(self, facts: dict[str, object]) -> None:
        for name, digest in {**self._scope.digests, "rule": self._rule.digest}.items():
            if facts.get(name) != digest:
                raise ForeignIndex(
                    f"{self._path} was made for another {name}: {str(facts.get(name))[:12]}, not "
                    f"{digest[:12]}: open another file, or rebuild this one with IndexFile.rebuild"
                )
