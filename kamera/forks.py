"""Safety over a fork: a child has copies of memory and descriptors, and none of the threads.

A lock that another thread held at the fork stays locked in the child, a pool of threads never works
there, and SQLite forbids a child to use its parent's connection. So every object bound to a process
defines its state in a child: it raises `ForkedStore` (`Gone`), or is made anew. Nothing waits for a thread
that only the parent has: the library's locks are `Lock`s, and its threads are bound.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload

from kamera.errors import ForkedStore

Bound = TypeVar("Bound")
Made = TypeVar("Made")

_handlers: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
# held over a fork, so that a child knows every open descriptor; reentrant, as a signal may come inside
_opening = threading.RLock()
_descriptors: set[int] = set()
_of_parents: list[object] = []

_LONGEST = 5.0  # seconds that a fork waits for threads inside `hold_off_forks`
_gate = threading.Condition()
_is_forking = False
_steady_count = 0
_thread = threading.local()


def call_in_child(owner: Bound, in_child: Callable[[Bound], None]) -> None:
    """Call ``in_child`` with ``owner`` in every child forked from this process, before anything else.

    ``in_child`` must not wait for a lock or close a connection. This does not keep ``owner`` alive.
    """
    with _opening:
        _handlers[owner] = in_child


def make_unusable(owner: object, *names: str) -> None:
    """Replace these attributes of ``owner`` by `Gone`, which raises `ForkedStore` when it is used."""
    for name in names:
        # never finalised: SQLite must not close a connection in a process that did not open it
        _of_parents.append(getattr(owner, name))
        setattr(owner, name, Gone())


class Lock:
    """A re-entrant lock between threads, which no forked child waits for.

    In a child it is free, unless the thread that forked holds it. If another thread held it, ``guarded`` (its
    name in the error) may be half changed there, so that taking the lock raises `ForkedStore`; without a name
    what the lock guards is whole at every moment, and the lock is made anew.
    """

    def __init__(self, guarded: str = "") -> None:
        self._guarded = guarded
        self._lock = threading.RLock()
        self._is_lost = False
        call_in_child(self, Lock._in_child)

    def __enter__(self) -> None:
        if self._is_lost:
            raise ForkedStore(
                f"another thread was using {self._guarded} when process {os.getpid()} was forked: make it "
                "anew in here"
            )
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def is_mine(self) -> bool:
        """True if this thread holds it."""
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Let other threads in for the block; this thread holds the lock, once."""
        self._lock.release()
        try:
            yield
        finally:
            self.__enter__()

    def _in_child(self) -> None:
        if self._lock.acquire(blocking=False):  # free, or the forking thread's own
            self._lock.release()
            return
        self._lock = threading.RLock()
        self._is_lost = bool(self._guarded)


class lazy(Generic[Made]):
    """A property that is computed when it is first read, and kept: decorates a method without arguments.

    `functools.cached_property` takes a lock of its class before Python 3.12, for which other threads wait
    through the whole computation, and a forked child for ever. Threads may compute this one twice.
    """

    def __init__(self, compute: Callable[[Any], Made]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[Made]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Made: ...
    def __get__(self, instance: object | None, owner: type) -> Made | lazy[Made]:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class Gone:
    """Stand-in for an object that is no more: any use raises ``error``, and closing it does nothing.

    By default it is one that a forked child cannot have.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def close(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        pass

    def _refuse(self, *_: object, **__: object) -> Any:
        raise self._error or ForkedStore(
            f"this store was opened before process {os.getpid()} was forked from {os.getppid()}: open it "
            "again in here (ChunkStore.open)"
        )

    __getattr__ = __call__ = __iter__ = __next__ = __contains__ = __getitem__ = __enter__ = _refuse


@contextlib.contextmanager
def open_lockable() -> Iterator[set[int]]:
    """Inside, no thread forks; descriptors that are opened there to be locked are added to the yielded set.

    A forked child closes its copies, and so holds no lock of its parent's. `close_lockable` closes one.
    """
    with _opening:
        yield _descriptors


def close_lockable(descriptor: int) -> None:
    """Close a descriptor of `open_lockable`."""
    with _opening:
        _descriptors.discard(descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def hold_off_forks() -> Iterator[None]:
    """Inside, no other thread forks.

    For statements and transactions of SQLite: a child forked in the middle of one mistakes its parent's
    lock for its own, and waits for it for ever.
    """
    global _steady_count
    depth = getattr(_thread, "depth", 0)
    if not depth:
        with _gate:
            _gate.wait_for(lambda: not _is_forking)
            _steady_count += 1
    _thread.depth = depth + 1
    try:
        yield
    finally:
        _thread.depth = depth
        if not depth:
            with _gate:
                _steady_count = max(0, _steady_count - 1)  # 0 in a child that was forked inside
                _gate.notify_all()


def _in_child() -> None:
    global _opening, _gate, _is_forking, _steady_count
    _opening, _gate, _is_forking, _steady_count = threading.RLock(), threading.Condition(), False, 0
    _thread.depth = 0
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    for owner, in_child in list(_handlers.items()):
        in_child(owner)


def _acquire() -> None:
    global _is_forking
    with _gate:
        _gate.wait_for(lambda: not _is_forking)
        _is_forking = True
        own = 1 if getattr(_thread, "depth", 0) else 0
        _gate.wait_for(lambda: _steady_count <= own, _LONGEST)
    _opening.acquire()


def _release() -> None:
    global _is_forking
    _opening.release()
    with _gate:
        _is_forking = False
        _gate.notify_all()


os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_in_child)
