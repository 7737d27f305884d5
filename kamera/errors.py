"""One exception class per kind of refusal. Every message names the problem, the value and the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

QUOTED = 80
"""Characters of a value in a message, at most."""

_LINE = 200  # of another library's message


def quote(value: Any) -> str:
    """A value as a message shows it: its repr on one line, at most `QUOTED` characters of it.

    A prompt, a picture or a list of ids would bury the remedy and fill a log.
    """
    # a repr is as long as its value: of a long one only the beginning is made
    if isinstance(value, os.PathLike):  # its end tells the file
        text = repr(os.fspath(value))
        return text if len(text) <= QUOTED else f"…{text[1 - QUOTED :]}"
    head = value[:QUOTED] if isinstance(value, str | bytes | bytearray | list | tuple) else value
    try:
        text = " ".join(repr(head).split())
    except Exception:
        text = f"<{type(value).__name__}>"
    is_cut = len(text) > QUOTED or (head is not value and len(head) < len(value))
    return f"{text[: QUOTED - 1]}…" if is_cut else text


def first_line(error: BaseException) -> str:
    """The first line of another library's message; that of the operating system without the path."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = text.strip().partition("\n")[0] or type(error).__name__
    return line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"


class KameraError(Exception):
    """Base class of Kamera's errors."""


class UnsupportedBackbone(KameraError):
    """The model's state is not a relocatable KV cache, or could not be proven to be one."""


class NotRelocatable(KameraError):
    """A chunk's new positions differ from its old ones by more than one offset per axis."""


class IncompatibleChunk(KameraError):
    """A chunk or record was made by another backbone, anchor, or layout."""


class NonFiniteKV(KameraError, ValueError):
    """A forward or an encoding gave NaN or infinities: none of it is stored or served."""


class ModelChanged(KameraError):
    """The model was written to, or its modules or adapters exchanged, since its fingerprint was made."""


class UnknownChunk(KameraError, KeyError):
    """The store holds no chunk of that id for this backbone and anchor."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class AmbiguousId(KameraError, ValueError):
    """A prefix of an id matches more than one chunk or object."""


class UnknownSlot(KameraError, ValueError):
    """The slot is not (or no longer) in this window."""


class InvalidPermutation(KameraError, ValueError):
    """A reordering does not name each of the window's slots once."""


class EmptyChunk(KameraError, ValueError):
    """A chunk must hold at least one token."""


class UnreadableMedia(KameraError, ValueError):
    """An image, frame list or video could not be read or has the wrong form."""


class ModalityNotSupported(KameraError, ValueError):
    """The backbone cannot take this kind of content (images to a text-only model, …)."""


class RoleNotSupported(ModalityNotSupported):
    """The chat template lacks the role, or cannot render a turn of it at this position."""


class NotSegmentable(ModalityNotSupported):
    """A conversation cannot be cut: its processor gives other tokens for the parts than for the whole."""


class UnknownSession(KameraError, KeyError):
    """The pool holds no session of that id, and the request lacks the whole history."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class UnknownTurn(UnknownSession):
    """There is no turn of that id: it was deleted or dropped, belongs to another tenant, or never existed."""


class SessionConflict(KameraError):
    """A session was continued elsewhere in the meantime; what was answered there stays."""


class UnsafeText(KameraError, ValueError):
    """A text contains the name of a special token, and this tokenizer cannot encode it as text."""


class ProcessorRequired(KameraError, ValueError):
    """Text or chat content was given to a backbone that has no processor."""


class WindowFull(KameraError):
    """The chunk does not fit in the window even without the older chunks."""


class PolicyRefused(KameraError):
    """The operations that the reuse policy allows cannot reach its minimum guarantee."""


class StalePlan(KameraError):
    """The window would not do what the plan says: it was made for another state, policy or store."""


class InvalidRecipe(KameraError, ValueError):
    """Text that is no recipe of a window, or one whose parts contradict each other."""


class StaleRecipe(KameraError):
    """The store no longer has what a recipe names: an object is gone or was replaced."""


class NotTransferable(KameraError):
    """The KV of a part of a recipe is only in the memory of the window that made it."""


class InvalidReport(KameraError):
    """A report of ``kamera certify`` cannot be read, was changed by hand, or is of an unknown format."""


class CorruptChunk(KameraError):
    """A stored object is damaged: it is never served."""


class ForeignObject(CorruptChunk):
    """An intact object in a sealed store was not written with the store's secret."""


class ForeignKey(CorruptChunk):
    """A remote has a value under an object's name that no store wrote; it is left there."""


class WrongKey(KameraError):
    """An object is encrypted under a missing key; it is left in place."""


class StoreVersionError(KameraError):
    """The store was written in a format this version cannot read."""


class StoreError(KameraError):
    """The store cannot be opened, or a write to it failed."""


class StoreClosed(StoreError):
    """The store was closed before this call."""


class NotKept(UserWarning):
    """A window continues without its store: an object could not be stored or read."""


class StoreReadOnly(StoreError):
    """The store was opened read-only, or its directory is not writable."""


class StoreFull(StoreError):
    """An object does not fit within the store's ``disk_limit``, or one that is to be shared was not kept."""


class PinsFull(StoreError):
    """The pins would exceed the store's cap of bytes."""


class ForkedStore(StoreError):
    """A forked child uses its parent's store, or a window that was changing during the fork."""


class RemoteUnavailable(StoreError):
    """A store's remote does not answer, or refuses; reads through the store are then misses."""


class PlanError(KameraError, ValueError):
    """Lines of a plan that cannot be compiled; ``problems`` are ``file:line: problem, and remedy``."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)  # what a pickle makes it of

    def __str__(self) -> str:
        return "\n".join(self.problems)


class TraceError(KameraError, ValueError):
    """A file is not a trace."""


class TaskDataError(KameraError):
    """A benchmark's files are missing, or not in the published layout."""


class InvalidDirective(KameraError, ValueError):
    """An edit outside of the prompt, overlapping another, or cutting an indivisible span."""


class EditPolicyFailed(KameraError):
    """An edit policy raised, returned no messages, or gives different results for equal arguments."""


class InvalidRequest(KameraError, ValueError):
    """A client's request is malformed or not supported; ``place`` names the field."""

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.place = place


class UnidentifiedMedia(KameraError, ValueError):
    """A media placeholder has no digest of its picture or clip."""


class UnsupportedByEngine(KameraError, ValueError):
    """An engine that schedules by itself cannot do what was asked of its window or session."""


class EngineFailed(KameraError):
    """An engine that schedules by itself did not answer."""
