"""The anchor: the tokens every window begins with, prefilled once and always exact; and who the model is."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kamera import forks
from kamera.content import Encoded, Spoken
from kamera.engines import Engine
from kamera.errors import UnsupportedBackbone
from kamera.ops import KV, kv_tensors, tensor_digest
from kamera.patches.background import Owed, Priority, background_of, put_owed, waiting_records
from kamera.patches.chunks import prefill_behind, prefix_kv
from kamera.patches.losses import LOOK_UP_ERRORS, Losses, Strict
from kamera.store import CanonicalRecord, ChunkStore, Context, encoding_context


class StoredIdentity(NamedTuple):
    """Fingerprints of a model and of its vision part when a window was made, and its `Engine.origin`."""

    fingerprint: str
    vision: str
    origin: str

    def context(self, anchor: str, tenant: str, kv: str = "as-is") -> Context:
        """The context of KV behind ``anchor``."""
        return Context(self.fingerprint, anchor, tenant, kv, self.origin)

    def encoding_context(self, tenant: str) -> Context:
        """The context of encodings."""
        return encoding_context(self.vision, tenant, self.origin)

    def check(self, backbone: Engine) -> None:
        """Raise ModelChanged or IncompatibleChunk unless the model is still the one of this fingerprint."""
        backbone.check(self.fingerprint)


def identify(backbone: Engine) -> StoredIdentity:
    """Who a model is. Raises ModelChanged, and UnsupportedBackbone if no KV of it can be used again."""
    if backbone.facts.no_reuse:
        raise UnsupportedBackbone(backbone.facts.no_reuse)
    return StoredIdentity(backbone.checked_fingerprint(), backbone.vision_fingerprint, backbone.origin)


@dataclass(frozen=True, eq=False)
class Anchor:
    """Token ids ``[tokens]``, positions ``[axes, tokens]``, KV, and the template's text around a question.

    ``tail`` and ``reopen`` are the chat template's text after a question and after an answer, ``identity``
    is the model's when it was made.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    kv: KV
    digest: str
    tail: str
    reopen: str
    identity: StoredIdentity

    @property
    def length(self) -> int:
        """Number of tokens."""
        return int(self.input_ids.shape[0])


def prefill_anchor(
    backbone: Engine,
    system: Spoken | None,
    store: ChunkStore | None = None,
    losses: Losses | None = None,
    *,
    later: bool = False,
) -> Anchor:
    """Tokenise and prefill a system prompt, text or messages; token ids are used as given.

    Without a processor, None gives an anchor of no tokens and text raises ProcessorRequired. ``store``,
    ``losses`` and ``later`` as in `anchor_of`.
    """
    seams = backbone.builder.seams(system if isinstance(system, str) else None)
    ids = backbone.builder.anchor_ids(system)
    return anchor_of(backbone, ids, seams.tail, seams.reopen, store, losses, later=later)


def anchor_of(
    backbone: Engine,
    ids: torch.Tensor,
    tail: str,
    reopen: str,
    store: ChunkStore | None = None,
    losses: Losses | None = None,
    *,
    later: bool = False,
) -> Anchor:
    """The anchor of given token ids: read from ``store`` if stored there, else prefilled and stored.

    What it begins with as another one that is held on the store does not run again (a clock behind the rest).
    A store of codes, too, keeps an anchor as the model computed it; a damaged one is a miss. Store errors are
    raised unless ``losses`` tolerate them. Raises as `identify`. With ``later`` it is stored as background
    work.
    """
    identity = identify(backbone)
    positions = backbone.positions([ids], [{}])
    digest = tensor_digest(ids)
    if store is None or not ids.shape[0]:
        kv = backbone.prefill([Encoded(ids)], [positions])[0]
        return Anchor(ids, positions, kv, digest, tail, reopen, identity)
    losses, context = losses or Strict(), identity.context(digest, store.tenant)
    if (there := waiting_records(store).anchors.get((context, digest))) is not None:
        return replace(there, tail=tail, reopen=reopen, identity=identity)
    found = None
    try:
        found = store.get_anchor(context)
    except LOOK_UP_ERRORS as error:
        losses.miss("system prompt", "the system prompt", error)
    if found is not None and torch.equal(found.positions, positions):
        return _held(store, Anchor(ids, positions, backbone.place(found.kv), digest, tail, reopen, identity))
    head = _head(store, ids, positions, identity)
    kv = prefill_behind(backbone, Encoded(ids), positions, None, head)
    anchor = _held(store, Anchor(ids, positions, kv, digest, tail, reopen, identity))
    record = CanonicalRecord(digest, context, ids, positions, kv, kind="anchor")
    owed = Owed(store, [record], losses, "the system prompt was not kept", later)
    if later:
        queue = background_of(backbone)
        waiting_records(store).anchors[context, digest] = anchor
        store.awaited[id(queue)] = queue.flush
        queue.add(lambda: [owed], Priority.CHUNK, kv_tensors(kv), owed.drop, reads=())
    else:
        put_owed([owed])
    return anchor


_anchors: weakref.WeakKeyDictionary[ChunkStore, weakref.WeakSet[Anchor]] = weakref.WeakKeyDictionary()
"""Those on a store that a window has."""

_lock = forks.Lock()


def _held(store: ChunkStore, anchor: Anchor) -> Anchor:
    with _lock:
        _anchors.setdefault(store, weakref.WeakSet()).add(anchor)
    return anchor


def _head(
    store: ChunkStore, ids: torch.Tensor, positions: torch.Tensor, identity: StoredIdentity
) -> KV | None:
    """KV of the most first tokens that an anchor on the ``store`` has, too; None if none has any."""
    with _lock:
        others = [a for a in _anchors.get(store, ()) if a.identity == identity]
    shared_tokens = [int(_equal(ids, other.input_ids).long().cumprod(0).sum()) for other in others]
    most = max(shared_tokens, default=0)
    if not most:
        return None
    best = others[shared_tokens.index(most)]
    return prefix_kv(ids, positions, best.input_ids, best.positions, best.kv, most)


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    count = min(len(one), len(other))
    return one[:count] == other[:count]
