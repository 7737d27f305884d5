"""A content index in a file that several processes share: a log of the additions of each prompt."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from kamera import forks
from kamera.errors import CorruptIndex, ForeignIndex, UnusableIndex
from kamera.reuse import frames
from kamera.reuse.index import ContentIndex, Found
from kamera.reuse.prompt import Prompt
from kamera.reuse.restored import stored_prompts
from kamera.reuse.rules import CutRule
from kamera.reuse.scope import Scope
from kamera.store import ChunkStore

# without O_NONBLOCK, opening a pipe in the file's place would block for ever
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class IndexFile:
    """A `ContentIndex` that appends its additions to a file and reads those of other processes.

    Appending locks the file; reading does not. A process killed during an append leaves an unfinished frame:
    readers stop before it, the next writer truncates it. The file holds token ids unencrypted and only its
    owner can read it (mode 0600). Not thread-safe. Every call raises UnusableIndex where the operating system
    refuses (a folder, a pipe or a link in the file's place, a missing folder, a full disk); `index` and what
    was written before stay as they are then, so that a caller may go on without the file.
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
        self._closed = False
        self._index = ContentIndex(scope, rule)
        self._end = 0
        self._digest = frames.FIRST
        self._open()
        forks.bind(self, IndexFile._let_go)  # a child would share the lock of this open file

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
        with _usable(target):
            if os.path.lexists(target):
                _check_regular(os.stat(target, follow_symlinks=False))
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

    def find(self, prompt: Prompt, edges: Sequence[int] = ()) -> Found:
        """As `ContentIndex.find`, after `refresh`."""
        self.refresh()
        return self._index.find(prompt, edges)

    def add(self, prompt: Prompt, cuts: Sequence[int] | None = None) -> int:
        """As `ContentIndex.add`, for every process that shares the file."""
        with _usable(self._path), self._locked():
            known = len(self._index)
            record = self._index.record_of(prompt, cuts)
            if record.lengths:
                self._append(frames.record_bytes(record))
                self._index.apply(record)
            return len(self._index) - known

    def refresh(self) -> None:
        """Read the additions of other processes. Raises `CorruptIndex` as on opening and keeps `index`."""
        with _usable(self._path):
            self._read()

    def _read(self) -> None:
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        own = None if self._file < 0 else os.fstat(self._file)
        if own is None or there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
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
        """Close the file; later calls raise UnusableIndex, but `index` stays."""
        self._let_go()
        self._closed = True

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        if self._closed:
            raise UnusableIndex(f"{self._path} was closed: open it again")
        self._let_go()
        before = self._index
        try:
            with _usable(self._path):
                self._file = os.open(self._path, _FLAGS, 0o600)
                _check_regular(os.fstat(self._file))
            self._index = ContentIndex(self._scope, self._rule)
            self._end = 0
            self._digest = frames.FIRST
            self.refresh()
            if self._end == 0:
                with _usable(self._path), self._locked():
                    pass
        except BaseException:
            self._let_go()
            self._index = before
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock with the file fully read, an unfinished frame truncated and the header written."""
        while True:
            if self._file < 0:
                self._open()
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


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Context whose errors of the operating system are UnusableIndex."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UnusableIndex(f"the index {str(path)!r} cannot be used: {why}; give another file") from None


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is a link, a folder or a pipe")
