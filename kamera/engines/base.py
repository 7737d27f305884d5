"""The contracts of this house with whatever runs a model: `Engine`, and `LiveKV`, which the model attends to.

Data runs one way: a chunk is encoded, prefilled behind a live KV, kept, and shown again. No
room above this one knows where a live KV stands: in one buffer of transformers, or in the pages of a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from kamera.content import Chunk, Content, Encoded, Seams, Spoken
from kamera.engines.extent import Extent
from kamera.errors import NotRelocatable
from kamera.ops import KV, CodedKV, Layout, Patch, kv_tokens

Answers = Mapping[str, Sequence[float]]
"""A few logits, by the name of what was asked."""


@dataclass(frozen=True, eq=False)
class Span:
    """One KV to be shown: R(offset)·(kv + patch).

    ``offset`` holds whole positions, one per axis, from where ``kv`` was computed. Two spans are of one
    source when they hold the same objects: whoever shows a KV again passes the object it has.
    """

    kv: KV
    patch: Patch | None
    offset: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens."""
        return self.kv.tokens if isinstance(self.kv, CodedKV) else kv_tokens(self.kv)

    def same_source(self, other: Span) -> bool:
        """Whether both are written from the same tensors."""
        return self.kv is other.kv and self.patch is other.patch


@dataclass(frozen=True)
class Written:
    """Bytes that a show wrote.

    ``bytes_turned`` are KV bytes of phased channels at an offset other than zero, ``bytes_patched`` those of
    the patches' factors that were applied, ``bytes_copied`` KV bytes that were written as they are.
    """

    bytes_turned: int = 0
    bytes_patched: int = 0
    bytes_copied: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(
            self.bytes_turned + other.bytes_turned,
            self.bytes_patched + other.bytes_patched,
            self.bytes_copied + other.bytes_copied,
        )


class LiveKV(Protocol):
    """What the model attends to: spans one after another, each where it is wanted.

    It is only ever a copy of what spans hold apart from it, so it can be thrown away and written again at any
    time. Threads may each use one; forks of one another may be used at the same time.
    """

    @property
    def shown(self) -> tuple[Span, ...]:
        """The spans it was last asked to show; none after an error."""
        ...

    @property
    def standing(self) -> tuple[Span, ...]:
        """The spans that stand in memory now, so that the next `show` need not write them.

        Those of a fork, perhaps, where forks share memory.
        """
        ...

    @property
    def tensors(self) -> KV:
        """The memory it stands in, free places included; forks may share it. None before the first show."""
        ...

    def show(self, spans: Sequence[Span], *, room: int = 0) -> Written:
        """Show ``spans`` one after another, with room for ``room`` more tokens behind them.

        What stands already is not written: which bytes are turned and patched is what
        `kamera.engines.moves` says. After an error it shows nothing, and the next call is right whatever
        happened. Neither the spans' KV nor their patches are modified.
        """
        ...

    def read(self, index: int) -> KV:
        """The KV of the span at ``index`` as it is shown, for reading; valid until the next show of this
        one or a fork of it."""
        ...

    def fork(self) -> LiveKV:
        """Another view that shows the same spans. What one of them shows from now on, the other does not."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError where what it keeps of spans and places contradicts itself; reads no KV."""
        ...


@dataclass(frozen=True)
class PositionLimits:
    """How far positions reach.

    From ``below`` on the model turns keys in another way, for ``reason``; ``trained`` is how many it was
    trained on. None: no limit of that kind.
    """

    trained: int | None = None
    below: int | None = None
    reason: str = ""

    @property
    def last(self) -> int:
        """The position from which on there are none to use."""
        return min((end for end in (self.trained, self.below) if end is not None), default=2**31)

    def check(self, highest: int) -> None:
        """Raise NotRelocatable for a position where the model turns keys in another way."""
        if self.below is not None and highest >= self.below:
            raise NotRelocatable(
                f"position {highest} reaches this model's limit of {self.below}: "
                f"{self.reason}; keep the window below it (max_tokens, slide)"
            )


class Named(NamedTuple):
    """A model in messages: its class, the checkpoint it came from ("" for none), and its dtype."""

    kind: str
    checkpoint: str
    dtype: str


class Probe(NamedTuple):
    """How to find out that a model computes something else than it says it does.

    ``moves`` counts how often something about it was seen to move; ``answers()`` asks it (forwards that
    nobody counts), and two answers of one model differ by at most ``tolerance``, a share of their length.
    """

    moves: int
    answers: Callable[[], Answers]
    tolerance: float


class Work(Protocol):
    """Running counts of model work: decoder forwards, tokens in them, runs of the vision tower."""

    @property
    def forwards(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def vision_encodes(self) -> int: ...


class Engine(Protocol):
    """A model that prefills, and answers behind a live KV of its own making.

    Safe to use from several threads. Tensors go in on any device and come out on those the model keeps its
    KV on; token ids and positions are int64 on the CPU.
    """

    @property
    def layout(self) -> Layout:
        """The channels of every layer."""
        ...

    @property
    def axes(self) -> int:
        """Position axes: one, or three for M-RoPE."""
        ...

    @property
    def limits(self) -> PositionLimits:
        """How far positions reach."""
        ...

    @property
    def named(self) -> Named:
        """The model, for messages."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides a chunk's KV, of the model as it is now. Raises ComputationChanged."""
        ...

    @property
    def vision_fingerprint(self) -> str:
        """Digest of all that decides a chunk's encoding. Raises ComputationChanged."""
        ...

    @property
    def probe(self) -> Probe:
        """How to tell a model that is not what its fingerprint says."""
        ...

    @property
    def vocabulary(self) -> str:
        """Digest of every token and its id; "" for an engine without a tokenizer."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's KV, all layers."""
        ...

    @property
    def phased_bytes_per_token(self) -> int:
        """Those of them that turn when a token moves."""
        ...

    # -- content -------------------------------------------------------------------------------

    @property
    def vision_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens in whose places picture features stand."""
        ...

    def chunk(self, content: Content) -> Chunk:
        """A chunk of content in any form a user has it in."""
        ...

    def chunk_from_tensors(self, input_ids: Any, *, label: str = "", **vision_inputs: Any) -> Chunk:
        """A chunk of token ids and the model's own inputs."""
        ...

    def anchor_ids(self, system: Spoken | None) -> torch.Tensor:
        """Token ids ``[tokens]`` a window under this system prompt begins with."""
        ...

    def question_ids(self, question: Spoken, tail: str) -> torch.Tensor:
        """Token ids ``[tokens]`` of a question; text gets ``tail`` behind it."""
        ...

    def seams(self, system: str | None) -> Seams:
        """The chat template's text before the first chunk, after a question, and after an answer."""
        ...

    def tokenize(self, text: str) -> torch.Tensor:
        """Token ids ``[tokens]`` of trusted text."""
        ...

    def detokenize(self, ids: torch.Tensor) -> str | None:
        """Text of token ids; None for an engine without a tokenizer."""
        ...

    # -- positions -----------------------------------------------------------------------------

    def positions(
        self, ids: Sequence[torch.Tensor], inputs: Sequence[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        """The model's own positions of spans one after another: int64 ``[axes, tokens]``."""
        ...

    def extents(self, spans: Sequence[tuple[str, Encoded]]) -> list[Extent] | None:
        """What each of ``(chunk id, encoding)`` adds to positions, standing one after another.

        None where that is no sum: `positions` of the whole sequence tells then. Raises IncompatibleChunk
        where two pictures would touch that the model takes for one.
        """
        ...

    # -- running -------------------------------------------------------------------------------

    def live(self) -> LiveKV:
        """A live KV that shows nothing yet."""
        ...

    def place(self, kv: KV) -> KV:
        """``kv`` on the devices the model keeps its KV on: itself when it is there. Codes stay codes."""
        ...

    def encode(self, chunk: Chunk) -> Encoded:
        """What the decoder receives for a chunk: one run of the vision tower, none for text."""
        ...

    def prefill(self, encoded: Encoded, positions: torch.Tensor, behind: LiveKV | None = None) -> KV:
        """One forward of a span at ``positions`` ``[axes, tokens]`` behind what ``behind`` shows.

        The KV that comes out is the caller's own. ``behind`` shows afterwards what it did. Raises
        NonFiniteKV, and NotRelocatable past a limit.
        """
        ...

    def ask(self, ids: torch.Tensor, positions: torch.Tensor, behind: LiveKV) -> torch.Tensor:
        """Next-token logits ``[vocabulary]`` after text ``ids`` behind what ``behind`` shows."""
        ...

    def ask_each(self, ids: torch.Tensor, positions: torch.Tensor, behind: LiveKV) -> torch.Tensor:
        """`ask` of rows of text ``ids`` ``[rows, tokens]``, all at ``positions``: ``[rows, vocabulary]``."""
        ...

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, behind: LiveKV, **sampling: Any
    ) -> torch.Tensor:
        """New tokens ``[sequences, new]`` after ``ids`` ``[tokens]``, a prefix of which ``behind`` shows.

        ``positions`` ``[axes, tokens]`` are those of all of ``ids``.
        """
        ...

    def measure(self) -> AbstractContextManager[Work]:
        """Count the work of this thread inside the block."""
        ...
