"""`Engine`: what windows, sessions and stores ask of a model; and what it says of itself and of its work."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import torch

from kamera.content import Chunk, ChunkBuilder, Content, Encoded
from kamera.engines.extent import Extents
from kamera.engines.moves import Written
from kamera.errors import NotRelocatable, quote
from kamera.ops import KV, Layout, Patch, kv_tokens


@dataclass(frozen=True)
class PositionLimits:
    """Limits of a model's positions.

    From ``below`` on the model rotates keys differently, for ``reason``; ``trained`` is the number of
    positions it was trained on. None: no limit of that kind.
    """

    trained: int | None = None
    below: int | None = None
    reason: str = ""

    @property
    def last(self) -> int:
        """The first position that cannot be used."""
        return min((end for end in (self.trained, self.below) if end is not None), default=2**31)

    def check_tokens(self, positions: torch.Tensor) -> None:
        """As `check`, for each of ``positions``."""
        if positions.numel():
            self.check(int(positions.max()))

    def check(self, highest: int) -> None:
        """Raise NotRelocatable for a position at which the model rotates keys differently."""
        if self.below is not None and highest >= self.below:
            raise NotRelocatable(
                f"position {highest} reaches this model's limit of {self.below}: "
                f"{self.reason}; keep the window below it (max_tokens, slide)"
            )


class ModelFacts(NamedTuple):
    """What a model is, apart from its layout.

    ``kind`` is its class, ``family`` that of its attention (MHA, GQA,
    MQA, MLA or MLA_EXPANDED, or several joined by "+"), ``no_reuse`` why no KV of it can be used
    again ("" if it can). It ``joins`` if adjacent spans of any kind share a forward. Bytes are those of a
    token's KV in all layers; its phased channels are rotated when the token moves.
    """

    kind: str
    family: str
    dtype: str
    bytes_per_token: int
    phased_bytes_per_token: int
    joins: bool = True
    no_reuse: str = ""


class Continuation(NamedTuple):
    """New tokens ``[sequences, new]``, and KV of what ran for them.

    ``kvs`` are those of the spans that came with the question, which ran in ``forwards`` forwards (the
    question's own counts as one of them). ``tail`` is that of the question and of the answer's tokens but
    those that the model was not asked to go on from; None of several sequences, or if it is not finite.
    ``first`` is the time (`time.perf_counter`) of the first token's logits. The caller owns the KVs.
    """

    tokens: torch.Tensor
    kvs: tuple[KV, ...]
    tail: KV | None
    forwards: int
    first: float


@dataclass(eq=False)
class Work:
    """Model work in an `Engine.measure` block: decoder forwards, tokens in them, runs of the vision tower."""

    forwards: int = 0
    tokens: int = 0
    vision_encodes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, forwards: int = 0, tokens: int = 0, vision_encodes: int = 0) -> None:
        """Count more; safe from several threads."""
        with self._lock:
            self.forwards += forwards
            self.tokens += tokens
            self.vision_encodes += vision_encodes


_NOT_SAID = torch.empty(0, 0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Span:
    """One KV to be shown, R(offset)·(kv + patch); ``kv`` is as the model computed it, and is never rotated.

    ``offset`` is the distance from the ``positions`` ``[axes, tokens]`` that ``kv`` was computed at (empty
    where nobody asks for them), in whole positions, one per axis. ``lossy``: it was decoded from codes, so it
    is close to the model's KV and never equal to it. ``content`` is the digest under which this very KV is
    stored, "" for none (`keep_kv`). Two spans have the same source if they hold the same objects, so a caller
    that shows a KV again passes the same object.
    """

    kv: KV
    patch: Patch | None
    offset: tuple[int, ...]
    positions: torch.Tensor = _NOT_SAID
    lossy: bool = False
    content: str = ""

    @classmethod
    def computed(
        cls, kv: KV, positions: torch.Tensor, patch: Patch | None = None, *, lossy: bool = False
    ) -> Span:
        """KV where it was computed."""
        return cls(kv, patch, (0,) * positions.shape[0], positions, lossy)

    def moved(self, offset: tuple[int, ...]) -> Span:
        """The same KV at an offset from where it was computed."""
        return Span(self.kv, self.patch, offset, self.positions, self.lossy, self.content)

    @cached_property
    def length(self) -> int:
        """Tokens."""
        return kv_tokens(self.kv)


class LiveKV(Protocol):
    """The KV that the model attends to: spans one after another, each at its wanted place.

    It is a copy of KV that the spans hold elsewhere, so it can be discarded and rewritten at any time.
    Threads may each use one; forks of one another may be used at the same time.
    """

    @property
    def shown(self) -> tuple[Span, ...]:
        """The spans of the last `show`; none after an error."""

    @property
    def tensors(self) -> KV:
        """Its memory as tensors, free places included; forks may share it. None before the first show."""

    def show(self, spans: Sequence[Span], *, room: int = 0) -> Written:
        """Show ``spans`` one after another, with room for ``room`` more tokens that stay behind them.

        Spans already in memory are not written: `kamera.engines.moves` decides which bytes are turned and
        patched. After an error it shows nothing, and the next call is correct after any error. Neither the
        spans' KV nor their patches are modified.
        """

    def hold(self, kv: KV) -> KV:
        """``kv``, which nobody else refers to, as it may be kept in this memory alone while it is shown.

        Without ``holds`` (`Engine.live`) it is ``kv`` itself.
        """

    def read(self, index: int) -> KV:
        """The shown KV of the span at ``index``, for reading; valid until the next `show` of this live KV
        or a fork of it."""

    def fork(self) -> LiveKV:
        """Another view that shows the same spans; a later `show` of one does not change the other."""

    def check_integrity(self) -> None:
        """Raise AssertionError if its records of spans and places contradict each other; reads no KV."""


class HasEngine(Protocol):
    """A backbone, which has an engine, or an engine, which is its own."""

    @property
    def engine(self) -> Engine: ...


def engine_of(backbone: object) -> Engine:
    """The engine of a backbone. Raises ValueError for what is none."""
    engine = getattr(backbone, "engine", None)
    if engine is None:
        raise ValueError(f"{quote(backbone)} is no Backbone: load one with Backbone.from_pretrained")
    return cast("Engine", engine)


class Identity(Protocol):
    """What audits ask of a model.

    ``tolerance`` is the most that answers of one model on two machines differ by, as a share of their norm.
    """

    tolerance: float

    def vocabulary(self) -> str:
        """Digest of every token and its id; "" for an engine without a tokenizer."""


class PlainModel(Protocol):
    """The model by itself, without reuse: it takes a whole prompt, as its processor gives it."""

    def logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Next-token logits ``[vocabulary]`` after a prompt."""

    def generate(self, inputs: Mapping[str, torch.Tensor], **sampling: Any) -> torch.Tensor:
        """New tokens ``[sequences, new]`` after a prompt; ``sampling`` as `Engine.decode`."""


class Engine(Protocol):
    """A model that prefills, and answers behind a live KV that it made.

    Safe to use from several threads. Tensors go in on any device and come out on the devices of the model's
    KV; token ids and positions are int64 on the CPU. ``layout`` has the channels of every layer; there is one
    position axis, or three for M-RoPE. ``processor`` is that of transformers, or a tokenizer (None: none);
    ``builder`` makes token ids and text of them, and names what the model's forward takes. ``extents`` are
    those of its chunks.
    """

    layout: Layout
    axes: int
    limits: PositionLimits
    facts: ModelFacts
    processor: Any
    builder: ChunkBuilder
    extents: Extents
    plain: PlainModel

    @property
    def identity(self) -> Identity: ...

    @property
    def engine(self) -> Engine:
        """Itself: whatever takes a backbone takes its engine, too."""

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides a chunk's KV, as it was last made: the model is not looked at."""

    def checked_fingerprint(self) -> str:
        """The fingerprint after a look at the model. Raises ModelChanged if that was changed since."""

    @property
    def vision_fingerprint(self) -> str:
        """Digest of all that decides a chunk's encoding."""

    @property
    def origin(self) -> str:
        """What made KV of this fingerprint, for people: as `kamera.store.Context` has it."""

    def check(self, fingerprint: str) -> None:
        """Look at the model, cheaply: raise ModelChanged, or IncompatibleChunk if ``fingerprint`` is not its.

        KV under that fingerprint may be shown to it afterwards. A forward may raise IncompatibleChunk, too,
        for hooks that came since.
        """

    # -- content -------------------------------------------------------------------------------

    def chunk(self, content: Content) -> Chunk:
        """A chunk of content, in any form a user may give."""

    def chunk_from_tensors(
        self, input_ids: Any, *, label: str = "", picture: Any = None, **vision_inputs: Any
    ) -> Chunk:
        """A chunk of token ids and the model's own inputs; ``picture`` is one to be looked at only."""

    # -- positions -----------------------------------------------------------------------------

    def positions(
        self, ids: Sequence[torch.Tensor], inputs: Sequence[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        """The model's own positions of consecutive spans: int64 ``[axes, tokens]``."""

    # -- running -------------------------------------------------------------------------------

    def live(self, *, holds: bool = False) -> LiveKV:
        """A live KV that shows nothing yet.

        If it ``holds``, KV that is prefilled behind it may be kept in its memory alone, as long as it stands
        there as the model computed it: for whoever goes on showing it.
        """

    def place(self, kv: KV) -> KV:
        """``kv`` on the devices of the model's KV; ``kv`` itself if it is there already. Codes stay codes."""

    def encode(self, chunk: Chunk) -> Encoded:
        """The encoding of a chunk: one run of the vision tower, none for text."""

    def form(self, span: Encoded) -> Hashable | None:
        """Equal for spans that may be rows of one forward; None: it runs alone."""

    def prefill(
        self,
        spans: Sequence[Encoded],
        positions: Sequence[torch.Tensor],
        behind: LiveKV | None = None,
        *,
        apart: bool = False,
    ) -> tuple[KV, ...]:
        """KV of spans that follow each other, each behind those before it and the spans ``behind`` shows.

        It is one forward if the model joins them. ``positions`` ``[axes, tokens]`` of each. With ``apart``
        none sees another, and spans of one `form` share a forward; each equals that of its own to
        rounding. The caller owns the KVs. ``behind`` shows the same spans afterwards. Raises NonFiniteKV,
        NotRelocatable past a limit, and ValueError for spans of different forms to be run apart.
        """

    def ask(
        self,
        texts: Sequence[torch.Tensor],
        positions: torch.Tensor,
        behind: LiveKV,
        *,
        every: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Next-token logits after each text of token ids ``[1, vocabulary]``, or each of its tokens.

        Each text stands alone at the beginning of ``positions`` ``[axes, tokens]``, behind the spans
        ``behind`` shows; texts share forwards.
        """

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Raise ValueError for an option that `decode` does not take; nothing runs."""

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        behind: LiveKV,
        spans: Sequence[Encoded] = (),
        **sampling: Any,
    ) -> Continuation:
        """New tokens after ``ids`` ``[tokens]``; ``behind`` shows a prefix of ``ids``, ``spans`` follow it.

        ``positions`` ``[axes, tokens]`` are those of all of ``ids``. Spans run in the forward of the rest of
        ``ids``, the question, if the model joins them and makes one sequence. Each ``logits_processor`` of
        ``sampling``, a list, is called with the tokens and the next one's logits, each of its
        ``stopping_criteria`` with the tokens, and ends the answer where it says True. Raises ValueError as
        `check_sampling`, and NonFiniteKV of spans before the first token.
        """

    def measure(self) -> AbstractContextManager[Work]:
        """Count the work of this thread inside the block."""
