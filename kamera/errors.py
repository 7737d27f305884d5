"""One exception class per kind of refusal. Every message says what, which value, and the way out."""

from __future__ import annotations

from collections.abc import Iterable


class KameraError(Exception):
    """Base of every refusal Kamera makes on purpose."""


class UnsupportedBackbone(KameraError):
    """The model's state is no relocatable KV cache, or could not be proven to be one."""


class NotRelocatable(KameraError):
    """A chunk's new positions are not its old ones plus one offset per axis."""


class IncompatibleChunk(KameraError):
    """A chunk or record was made by another backbone, anchor, or layout."""


class NonFiniteKV(KameraError, ValueError):
    """A forward or an encoding gave NaN or infinities: nothing of it is kept or served."""


class ComputationChanged(KameraError):
    """The model computes something else than it did: when its Backbone, or what a store holds, was made."""


class UnknownChunk(KameraError, KeyError):
    """No chunk of that id is in the store under this backbone and anchor."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class AmbiguousId(KameraError, ValueError):
    """The start of an id names more than one chunk or object."""


class UnknownSlot(KameraError, ValueError):
    """The slot named is not (or no longer) in this window."""


class InvalidPermutation(KameraError, ValueError):
    """A reordering does not name each of the window's slots once."""


class EmptyChunk(KameraError, ValueError):
    """A chunk must hold at least one token."""


class UnreadableMedia(KameraError, ValueError):
    """An image, frame list or video could not be read or has the wrong form."""


class ModalityNotSupported(KameraError, ValueError):
    """The backbone cannot take this kind of content (images to a text-only model, …)."""


class RoleNotSupported(ModalityNotSupported):
    """The chat template has no such role, or cannot write a turn of it where it is asked to."""


class NotSegmentable(ModalityNotSupported):
    """A conversation cannot be cut: its processor makes other tokens of the parts than of the whole."""


class UnknownSession(KameraError, KeyError):
    """No session of that id is in the pool, or it is of no use without its history."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class UnsafeText(KameraError, ValueError):
    """A text spells a special token, and this tokenizer cannot write it as text."""


class ProcessorRequired(KameraError, ValueError):
    """Text or chat content was given to a backbone that has no processor."""


class WindowFull(KameraError):
    """The chunk does not fit the window even when every older chunk has left."""


class PolicyRefused(KameraError):
    """The reuse policy's least guarantee cannot be met by what it allows to be done."""


class InvalidCertificate(KameraError):
    """A certificate cannot be read, was edited by hand, or is of a format this version does not know."""


class CertificateMismatch(KameraError):
    """A certificate that was given by name does not let this backbone serve under this policy."""


class UncertifiedBackbone(UserWarning):
    """No certificate lets this backbone serve reused KV: the window prefills every chunk exactly."""


class CorruptChunk(KameraError):
    """A stored object is damaged: it is never served."""


class ForeignObject(CorruptChunk):
    """An intact object lies in a sealed store, but nobody who holds its secret wrote it."""


class ForeignKey(CorruptChunk):
    """Something that no store wrote lies in a remote in the place of an object; it is left there."""


class WrongKey(KameraError):
    """An object is encrypted under a key that was not given; it is left where it is."""


class StoreVersionError(KameraError):
    """The store was written in a format this version cannot read."""


class StoreError(KameraError):
    """The store cannot be opened, or a write to it failed."""


class StoreClosed(StoreError):
    """The store was closed before this call."""


class NotKept(UserWarning):
    """A window goes on without its store: what it computed was not kept, or what is kept was not found."""


class StoreReadOnly(StoreError):
    """The store was opened to be read, or its folder cannot be written."""


class StoreFull(StoreError):
    """The object does not fit within the store's ``disk_limit``, whatever leaves."""


class PinsFull(StoreError):
    """More bytes would be pinned than the store's cap allows."""


class ForkedStore(StoreError):
    """A store that was opened before a fork is used in the child, which has none of its threads and locks."""


class RemoteUnavailable(StoreError):
    """The remote behind a store does not answer, or refuses; reads through the store are misses then."""


class PlanError(KameraError, ValueError):
    """Lines of a plan that cannot be compiled; ``problems`` are ``file:line: what, and what to do``."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class TraceError(KameraError, ValueError):
    """A file is no record of window operations."""


class ClusterError(KameraError):
    """The workers of a job cannot be had, disagree, or keep dying."""


class TaskDataError(KameraError):
    """A benchmark's files are not there, or not laid out as published."""


class InvalidDirective(KameraError, ValueError):
    """An edit of a prompt that lies outside it, overlaps another, or cuts what must stay whole."""


class EditPolicyFailed(KameraError):
    """An edit policy raised, returned no messages, or gives another answer when it is asked again."""


class UnidentifiedMedia(KameraError, ValueError):
    """Tokens stand for a picture or clip, and no digest says which."""


class CorruptIndex(KameraError):
    """A file of the content index is damaged, or of a format this version does not know."""


class ForeignIndex(KameraError):
    """A content index was made for another model, tokenizer, tenant or cut rule."""


class TraceHole(TraceError):
    """A trace of requests leaves out what a request consisted of."""
