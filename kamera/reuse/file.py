"""A content index in a file that several processes share: a log of what each prompt added."""

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
from kamera.reuse.rules import CutRule
from kamera.reuse.scope import Scope


class IndexFile:
    """A `ContentIndex` whose additions are appended to a file, and which takes in those of others.

    Appending locks the file; reading does not. A process that is killed while it appends leaves an
    unfinished frame: readers stop before it, the next writer cuts it off. The file holds token ids in the
    clear: it is made for its owner's eyes only (mode 0600). Not for several threads at once.
    """

    def __init__(self, path: str | Path, scope: Scope, rule: CutRule) -> None:
        """Open the index at ``path``, made if there is none.

        `ForeignIndex` for one of another model, tokenizer, tenant or rule, `CorruptIndex` for a damaged one;
        the file stays as it is. `rebuild` makes it anew.
        """
        self._path = Path(path)
        self._scope = scope
        self._rule = rule
        self._file = -1
        self._digest = frames.FIRST
        self._open()

    @classmethod
    def rebuild(cls, path: str | Path, scope: Scope, rule: CutRule, prompts: Iterable[Prompt]) -> IndexFile:
        """Put an index of ``prompts`` alone in the place of whatever lies at ``path``.

        Other processes go over to it when they next look.
        """
        target = Path(path)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
        os.close(handle)
        try:
            os.unlink(name)
            with cls(name, scope, rule) as fresh:
                for prompt in prompts:
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
        """What was read so far."""
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
        """Take in what other processes added. `CorruptIndex` as on opening; what was read before stays."""
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
        """Let go of the file."""
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
        """Alone with the file, all of it read, no unfinished frame behind it and a header before it."""
        while True:
            handle = self._file
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                self.refresh()
                if self._file != handle:  # another file took its place before it was locked
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
            raise CorruptIndex(f"{self._path}: {error}: make the index anew with IndexFile.rebuild") from None

    def _facts(self) -> dict[str, object]:
        return {**self._scope.digests, "rule": self._rule.digest, "cut": self._rule.to_info()}

    def _check(self, facts: dict[str, object]) -> None:
        for name, digest in {**self._scope.digests, "rule": self._rule.digest}.items():
            if facts.get(name) != digest:
                raise ForeignIndex(
                    f"{self._path} was made for another {name}: {str(facts.get(name))[:12]}, not "
                    f"{digest[:12]}: open another file, or make this one anew with IndexFile.rebuild"
                )
