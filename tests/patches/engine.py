"""An engine without transformers: two layers of attention over a table of embeddings, and a plain live KV.

It is small enough to read at a glance, runs in a millisecond, and every number in it follows from a seed. A
live KV is written with `kamera.ops.apply_patch`, the slow reference; keys are turned here, pair by pair.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kamera.content import Chunk, Encoded, Seams
from kamera.engines import (
    Continuation,
    Extents,
    LiveKV,
    ModelFacts,
    PositionLimits,
    Span,
    Written,
)
from kamera.errors import IncompatibleChunk
from kamera.ops import (
    KV,
    NO_KV,
    PatchBudget,
    RopeSpec,
    apply_patch,
    attention_layout,
    kv_concat,
    kv_of,
    kv_slice,
    tensor_digest,
)
from kamera.patches import Before, Former, prefill_anchor
from kamera.patches.making import Line
from kamera.store import ChunkStore

WIDTH, LAYERS, VOCABULARY = 8, 2, 50
ROPE = RopeSpec((1.0, 0.3, 0.1, 0.03), (0, 0, 0, 0), 1, "half")
LAYOUT = (attention_layout(1, 1, WIDTH, WIDTH, ROPE),) * LAYERS
ANCHOR = torch.tensor([1, 2, 3])


class PlainLive:
    """Spans one after another; every show writes all of them anew."""

    def __init__(self) -> None:
        self.shown: tuple[Span, ...] = ()
        self.written: list[KV] = []

    @property
    def standing(self) -> tuple[Span, ...]:
        return self.shown

    @property
    def tensors(self) -> KV:
        return kv_concat(self.written) if self.written else NO_KV

    def show(self, spans: Sequence[Span], *, room: int = 0) -> Written:
        self.shown = tuple(spans)
        self.written = [apply_patch(span.kv, span.patch, LAYOUT, span.offset) for span in spans]
        return Written()

    def read(self, index: int) -> KV:
        return self.written[index]

    def fork(self) -> PlainLive:
        other = PlainLive()
        other.show(self.shown)
        return other

    def hold(self, kv: KV) -> KV:
        return kv

    def check_integrity(self) -> None:
        assert len(self.shown) == len(self.written)


@dataclass
class Done:
    """Work counted so far."""

    forwards: int = 0
    tokens: int = 0
    vision_encodes: int = 0


@dataclass(eq=False)
class SmallEngine:
    """`kamera.engines.Engine`; what its fields say can be changed to make it another model.

    A picture's ids are all `PICTURE`; its features come in ``inputs["pixels"]``. With ``words`` a text
    question is one token a character.
    """

    fingerprint: str = "f" * 64
    vision_fingerprint: str = "e" * 64
    words: str = ""
    seed: int = 0
    token_count: int = VOCABULARY
    generation_config: None = None
    processor: Any = None
    origin: str = ""
    done: Done = field(default_factory=Done)
    layout = LAYOUT
    axes = 1
    limits = PositionLimits()
    facts = ModelFacts("SmallEngine", "MHA", "float32", LAYERS * WIDTH * 4, LAYERS * WIDTH * 4)
    tolerance = 1e-3
    vision_tokens = (49,)
    accepted = ("input_ids", "pixels")

    @property
    def engine(self) -> SmallEngine:
        return self

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / WIDTH**0.5

        self.extents = Extents(self.positions, self.vision_tokens)
        self.plain = Plain(self)
        self.embedding = 2 * weight(self.token_count, WIDTH)
        self.weights = [{name: weight(WIDTH, WIDTH) for name in "qkvo"} for _ in range(LAYERS)]

    # -- what it runs --------------------------------------------------------------------------

    def _forward(self, hidden: torch.Tensor, positions: torch.Tensor, behind: KV) -> tuple[KV, torch.Tensor]:
        self.done.forwards += 1
        self.done.tokens += len(hidden)
        made = []
        for layer, weights in enumerate(self.weights):
            q, k = (_turned(hidden @ weights[name], positions[0]) for name in "qk")
            made.append({"k": k[None], "v": (hidden @ weights["v"])[None]})
            keys, values = k, made[-1]["v"][0]
            if behind:
                keys = torch.cat([behind[layer]["k"][0], keys])
                values = torch.cat([behind[layer]["v"][0], values])
            hidden_from = torch.ones(len(q), len(keys)).tril(len(keys) - len(q)).log()
            attended = ((q @ keys.T) / WIDTH**0.5 + hidden_from).softmax(-1) @ values
            hidden = hidden + attended @ weights["o"]
        return kv_of(made), hidden @ self.embedding.T

    def form(self, span: Encoded) -> int:
        return span.num_tokens

    def prefill(
        self,
        spans: Sequence[Encoded],
        positions: Sequence[torch.Tensor],
        behind: LiveKV | None = None,
        *,
        apart: bool = False,
    ) -> tuple[KV, ...]:
        past = NO_KV if behind is None else behind.tensors
        hidden = [s.tensors.get("features", self.embedding[s.input_ids]) for s in spans]
        if apart:
            made = [self._forward(*one, past)[0] for one in zip(hidden, positions, strict=True)]
            self.done.forwards -= len(spans) - 1
            return tuple(made)
        kv, _ = self._forward(torch.cat(hidden), torch.cat(list(positions), dim=1), past)
        stops = list(itertools.accumulate(map(len, hidden)))
        return tuple(kv_slice(kv, a, b) for a, b in zip([0, *stops], stops, strict=False))

    def ask(
        self,
        texts: Sequence[torch.Tensor],
        positions: torch.Tensor,
        behind: LiveKV,
        *,
        every: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        rows = [(self.embedding[ids], positions[:, : len(ids)]) for ids in texts]
        found = [self._forward(*row, behind.tensors)[1] for row in rows]
        return tuple(found if every else [logits[-1:] for logits in found])

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        behind: LiveKV,
        spans: Sequence[Encoded] = (),
        *,
        max_new_tokens: int = 1,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
    ) -> Continuation:
        start, asked = sum(span.length for span in behind.shown), len(ids)
        rows = [s.tensors.get("features", self.embedding[s.input_ids]) for s in spans]
        stop = start + sum(map(len, rows))
        for _ in range(max_new_tokens):
            hidden = torch.cat([*rows, self.embedding[ids[stop:]]])
            kv, logits = self._forward(hidden, positions[:, start:], behind.tensors)
            for process in logits_processor:
                process(ids[None], logits[-1:])
            ids = torch.cat([ids, logits[-1].argmax()[None]])
            positions = torch.cat([positions, positions[:, -1:] + 1], dim=1)
            if any([bool(ends(ids[None], None).all()) for ends in stopping_criteria]):
                break
        stops = list(itertools.accumulate([*map(len, rows), len(ids) - 1 - stop]))
        *kvs, tail = (kv_slice(kv, a, b) for a, b in zip([0, *stops], stops, strict=False))
        return Continuation(ids[None, asked:], tuple(kvs), tail, int(bool(spans)), time.perf_counter())

    def encode(self, chunk: Chunk) -> Encoded:
        if not chunk.has_media:
            return Encoded(chunk.input_ids, {}, {}, chunk.id, chunk.label)
        self.done.vision_encodes += 1
        return Encoded(
            chunk.input_ids, {}, {"features": chunk.inputs["pixels"].tanh()}, chunk.id, chunk.label
        )

    @contextlib.contextmanager
    def measure(self) -> Iterator[Done]:
        before, work = Done(**vars(self.done)), Done()
        yield work
        for name, count in vars(self.done).items():
            setattr(work, name, count - getattr(before, name))

    # -- what it says --------------------------------------------------------------------------

    def checked_fingerprint(self) -> str:
        return self.fingerprint

    def check(self, fingerprint: str) -> None:
        if fingerprint != self.fingerprint:
            raise IncompatibleChunk("this is KV of another model, says the test")

    @property
    def identity(self) -> SmallEngine:
        return self

    @property
    def builder(self) -> SmallEngine:
        return self

    def vocabulary(self) -> str:
        return self.words

    def positions(
        self, ids: Sequence[torch.Tensor], inputs: Sequence[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        return torch.arange(sum(map(len, ids)))[None]

    def live(self, *, holds: bool = False) -> PlainLive:
        return PlainLive()  # it copies whatever is placed, whether it may hold it or not

    def place(self, kv: KV) -> KV:
        return kv

    def chunk(self, content: str) -> Chunk:
        return Chunk(self.tokenize(content), {}, self.fingerprint, content)

    def chunk_from_tensors(
        self, input_ids: Any, *, label: str = "", picture: Any = None, **vision_inputs: Any
    ) -> Chunk:
        return Chunk(torch.as_tensor(input_ids), vision_inputs, self.fingerprint, label, picture)

    def detokenize(self, ids: torch.Tensor) -> None:
        return None

    def seams(self, system: str | None) -> Seams:
        return Seams("", "", "")

    def anchor_ids(self, system: Any) -> torch.Tensor:
        return ANCHOR if system is None else torch.as_tensor(system, dtype=torch.int64)

    def tokenize(self, text: str) -> torch.Tensor:
        return torch.tensor([ord(letter) % VOCABULARY for letter in text], dtype=torch.int64)

    def question_ids(self, question: str, tail: str) -> torch.Tensor:
        return self.tokenize(question + tail)


@dataclass(frozen=True)
class Plain:
    """`kamera.engines.PlainModel` of a small engine."""

    engine: SmallEngine

    def logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        (ids,) = inputs["input_ids"]
        return self.engine.ask([ids], torch.arange(len(ids))[None], PlainLive())[0][-1]

    def generate(self, inputs: Mapping[str, torch.Tensor], **sampling: Any) -> torch.Tensor:
        (ids,) = inputs["input_ids"]
        return self.engine.decode(ids, torch.arange(len(ids))[None], PlainLive(), **sampling).tokens


def _turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``x`` ``[tokens, WIDTH]`` at its positions ``[tokens]``, in pairs of halves."""
    angles = (positions[:, None].double() * torch.tensor(ROPE.inv_freq, dtype=torch.float64)).float()
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# -- content -----------------------------------------------------------------------------------


def text(seed: int, tokens: int = 6) -> Encoded:
    """The encoding of a text."""
    ids = torch.randint(4, VOCABULARY - 1, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Encoded(ids, chunk_id=tensor_digest(ids), label=f"text {seed}")


def picture(seed: int, tokens: int = 5) -> Chunk:
    """A picture, as the engine's user gives it."""
    pixels = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    return Chunk(torch.full((tokens,), 49), {"pixels": pixels}, "", f"picture {seed}")


# -- patches -----------------------------------------------------------------------------------

WHOLE = PatchBudget(64)  # more directions than any chunk here has tokens


def former_of(engine: SmallEngine, store: ChunkStore, budget: PatchBudget = WHOLE, **options: Any) -> Former:
    """The former of a store's objects under the usual anchor, or another's token ids (``system``)."""
    anchor = prefill_anchor(engine, options.pop("system", None), store)
    return Former(engine, store, anchor, budget, **options)


def conditioned(former: Former, *chunks: Encoded) -> tuple[Span, Before]:
    """The last of these chunks, prefilled behind the others, and what stands there."""
    line = Line(former)
    line.arrange(chunks[:-1])
    return line.prefill(chunks[-1]), line.before
