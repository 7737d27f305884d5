"""A window, and the slow obvious thing it is held against: the plain model over the whole sequence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, DynamicCache

from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.content import Spoken
from kamera.engines import Engine, Usage
from kamera.engines.hf import HfEngine
from kamera.ops import KV, kv_copy, kv_of, relocate_kv
from kamera.patches import background_of
from kamera.window import Arrange, former_of, sequence_of
from tests.engines.compare import relative, worst
from tests.models import samples, tiny
from tests.models.hooks import hooked

SYSTEM = torch.tensor([5, 6, 7, 8])
QUESTION = torch.tensor([9, 10, 11, 12])
FULL_RANK = 64  # more than any chunk here has tokens
GREEDY = {"do_sample": False, "pad_token_id": 0}


def make(
    backbone: HfEngine, store: ChunkStore | None = None, *chunks: Chunk, policy=None, **options
) -> KameraWindow:
    """A window under `SYSTEM` with ``chunks`` appended."""
    store = ChunkStore.open("memory://") if store is None else store
    window = KameraWindow(
        backbone, store, SYSTEM, policy=policy or ReusePolicy(rank=FULL_RANK, forms="always"), **options
    )
    for chunk in chunks:
        window.append(chunk)
    return window


def over(window: KameraWindow) -> tuple[Engine, ChunkStore]:
    """The backbone and the store of a window."""
    former = former_of(window)
    return former.backbone, former.store


def pictures(backbone: HfEngine, family: str, count: int) -> list[Chunk]:
    """Different chunks with pictures in them (text for families without)."""
    return [samples.chunk(backbone, samples.sample(family, seed), f"p{seed}") for seed in range(count)]


def rig(family: str, count: int = 4) -> tuple[HfEngine, list[Chunk]]:
    """The shared backbone of a family, and chunks: pictures and, last, a text of another length."""
    backbone = sparse() if family == "deepseek_v32" else tiny.backbone(family)
    text = backbone.chunk_from_tensors(samples.text_ids(5, seed=77), label="text")
    return backbone, [*pictures(backbone, family, count - 1), text]


@functools.cache
def sparse() -> HfEngine:
    """DeepSeek-V3.2 with enough indexer heads that scores rarely tie.

    A score is a sum of ReLUs. With two heads many are exactly zero, and which of the tied tokens the
    model attends to depends on the shape of the call: it disagrees with itself, chunked against whole.
    """
    config = tiny.build("deepseek_v32").config.to_dict() | {"index_n_heads": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DeepseekV32ForCausalLM(DeepseekV32Config(**config)).eval()
    tiny.randomise(model, 1)
    return HfEngine(model.to(tiny.DEVICE))


# -- the plain model -------------------------------------------------------------------------------


class Prefilled:
    """One call of the plain model over anchor, chunks and question: no window, no patch, no move."""

    def __init__(
        self,
        backbone: HfEngine,
        chunks: Sequence[Chunk],
        question: torch.Tensor = QUESTION,
        system: torch.Tensor = SYSTEM,
    ) -> None:
        spans = [backbone.chunk_from_tensors(system), *chunks, backbone.chunk_from_tensors(question)]
        self.backbone = backbone
        ids, inputs = samples.join(spans)
        device = next(backbone.model.parameters()).device  # not every model tells its own
        self.ids = ids.to(device)
        self.inputs = {name: given.to(device) for name, given in inputs.items()}
        self.lengths = [s.num_tokens for s in spans]
        # A cache made without a config keeps every token; one of a sliding model would keep a tail.
        indexed = any(c.tensor == "indexer_keys" for spec in backbone.layout for c in spec.channels)
        cache = DynamicCache(config=backbone.config) if indexed else DynamicCache()
        with torch.no_grad():
            out = backbone.model(
                input_ids=self.ids,
                attention_mask=torch.ones_like(self.ids),
                past_key_values=cache,
                use_cache=True,
                **self.inputs,
            )
        self.logits = out.logits[0, -1]
        self._layers = cache.layers

    def kv(self, index: int) -> KV:
        """The KV of the chunk at ``index``, as the model computed it there."""
        start = sum(self.lengths[: index + 1])
        stop = start + self.lengths[index + 1]
        out: list[dict[str, torch.Tensor]] = []
        for i, spec in enumerate(self.backbone.layout):
            if not spec.channels:  # it reads another's KV: caches have no layer for it
                out.append({})
                continue
            layer = self._layers[i]
            tensors = {c.name: getattr(layer, c.tensor) for c in spec.channels}
            whole = {n: t if t.dim() == 3 else t[0] for n, t in tensors.items()}
            out.append({n: t[:, start:stop] for n, t in whole.items()})
        return kv_of(out, self.backbone.groups)

    def generate(self, **options) -> torch.Tensor:
        """New tokens ``[sequences, new]`` of the model's own generate on the concatenated prompt."""
        with torch.no_grad():
            out = self.backbone.model.generate(
                input_ids=self.ids, attention_mask=torch.ones_like(self.ids), **self.inputs, **options
            )
        return out[:, self.ids.shape[1] :].cpu()


def rope_index(backbone: HfEngine, chunks: Sequence[Chunk]) -> torch.Tensor:
    """The model's own positions of anchor and chunks: ``[axes, tokens]``."""
    ids, inputs = samples.join([backbone.chunk_from_tensors(SYSTEM), *chunks])
    if backbone.axes == 1:
        return torch.arange(ids.shape[1])[None]
    names = {"second_per_grid_ts": "second_per_grid_ts"}
    wanted = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", *names)
    given = {n: t for n, t in inputs.items() if n in wanted}
    if not any(n.endswith("grid_thw") for n in given):
        return torch.arange(ids.shape[1]).expand(3, -1)
    positions, _ = backbone.model.model.get_rope_index(ids, **given)
    return positions[:, 0].cpu()


# -- looking into a window -------------------------------------------------------------------------


def frame(window: KameraWindow) -> tuple[int, ...]:
    """How far the live positions of a window are from its own, per axis."""
    return window.plan(Arrange(window.slots)).before.frame


def question_ids(window: KameraWindow, question: Spoken) -> torch.Tensor:
    """Token ids of a question as a window asks it."""
    former = former_of(window)
    return former.backbone.builder.question_ids(question, former.anchor.tail)


def live(window: KameraWindow, index: int) -> KV:
    """The KV a slot shows the model, turned to the window's own positions."""
    state = window._state
    window._executor.show(state)
    kv = window._executor.live.read(index + 1)  # behind the anchor
    home = [-f for f in state.seats.frame]
    return relocate_kv(kv_copy(kv), former_of(window).backbone.layout, home)


def addresses(window: KameraWindow, index: int) -> list[int]:
    """Where in memory a slot's KV stands, channel by channel."""
    window._executor.show(window._state)
    return [t.data_ptr() for layer in window._executor.live.read(index + 1) for t in layer.values()]


def shares(a: KameraWindow, b: KameraWindow, index: int) -> bool:
    """Whether two windows show the model the very same memory for a slot."""
    return addresses(a, index) == addresses(b, index)


def chunks_of(window: KameraWindow, known: Sequence[Chunk]) -> list[Chunk]:
    """The chunks in the window, in order."""
    by_id = {c.id: c for c in known}
    return [by_id[s.chunk_id] for s in window.slots]


def guarantees(window: KameraWindow) -> list[str]:
    """What each slot says it is worth."""
    return [s.guarantee for s in window.slots]


def same_bits(a: KV, b: KV) -> bool:
    """Whether two KVs agree in every bit."""
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in zip(a, b, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A window's slots, positions, KV and answer, to compare with later."""

    slots: tuple
    ids: torch.Tensor
    positions: torch.Tensor
    kv: tuple[KV, ...]
    logits: torch.Tensor

    @classmethod
    def of(cls, window: KameraWindow) -> Snapshot:
        """As it is now; tensors are copied, so a write in place shows."""
        kv = tuple(kv_copy(live(window, i)) for i in range(len(window)))
        logits = window.next_token_logits(QUESTION)
        return cls(window.slots, sequence_of(window).input_ids, sequence_of(window).position_ids, kv, logits)

    def matches(self, window: KameraWindow, numbers: bool = True) -> bool:
        """Bit for bit the same window (slot ``numbers`` apart, after a load)."""
        now = Snapshot.of(window)

        def plain(slots: tuple) -> list:
            return [s if numbers else dataclasses.replace(s, number=0) for s in slots]

        return (
            plain(now.slots) == plain(self.slots)
            and torch.equal(now.ids, self.ids)
            and torch.equal(now.positions, self.positions)
            and len(now.kv) == len(self.kv)
            and all(same_bits(a, b) for a, b in zip(now.kv, self.kv, strict=True))
            and torch.equal(now.logits, self.logits)
        )


def inventory(store: ChunkStore) -> list[tuple]:
    """What a store holds, once all that windows archive later is stored."""
    for flush in list(store.awaited.values()):
        flush()
    return [(i.key, i.kind, i.created) for i in store.ls()]


def is_a_reprefill(window: KameraWindow, known: Sequence[Chunk], bound: float = 1e-4) -> bool:
    """Whether the window answers as the plain model does over the concatenated sequence."""
    plain = Prefilled(former_of(window).backbone, chunks_of(window, known))
    return relative(window.next_token_logits(QUESTION), plain.logits) <= bound


def distance(window: KameraWindow, index: int, plain: Prefilled) -> float:
    """Relative error of a slot's KV against the re-prefill's at the same place."""
    return worst(live(window, index), plain.kv(index))


# -- counting without Kamera's meter ---------------------------------------------------------------


@dataclasses.dataclass
class Seen:
    """Work the model did, as the test's own hooks saw it."""

    forwards: int = 0
    tokens: int = 0
    encodes: int = 0
    spans: list[int] = dataclasses.field(default_factory=list)  # tokens of each forward


@contextmanager
def watching(backbone: HfEngine, *, later: bool = False) -> Iterator[Seen]:
    """Count runs of the first decoder layer and of the vision tower, those of an operation alone.

    With ``later`` those of background work, too, which accounts bear: what windows before left for later is
    done first.
    """
    seen = Seen()
    queue = background_of(backbone)
    if later:
        queue.flush()

    def counts() -> bool:
        return later or not queue.is_own_thread

    modules = dict(backbone.model.named_modules())
    first = next(m for n, m in modules.items() if n.endswith(("language_model.layers.0", "model.layers.0")))
    towers = [m for n, m in modules.items() if n.split(".")[-1] in ("visual", "vision_tower")]

    def decoded(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        if not counts():
            return
        seen.forwards += 1
        seen.tokens += hidden.shape[0] * hidden.shape[1]
        seen.spans.append(hidden.shape[1])

    def encoded(module, args, kwargs):
        seen.encodes += counts()

    hooks = [(first.register_forward_pre_hook, decoded)]
    hooks += [(t.register_forward_pre_hook, encoded) for t in towers]
    with hooked(backbone, *hooks, with_kwargs=True):
        yield seen


def borne(seen: Seen, *usages: Usage) -> bool:
    """Whether accounts, now and later together, hold what hooks of the test saw, each once."""
    spent = [part for usage in usages for part in usage]
    total = tuple(sum(getattr(s, name) for s in spent) for name in ("forwards", "tokens", "vision_encodes"))
    assert all(part.seconds >= 0.0 for part in spent)
    return total == (seen.forwards, seen.tokens, seen.encodes)


@contextmanager
def breaking(backbone: HfEngine, after: int = 0) -> Iterator[None]:
    """Let the model fail: its decoder raises from the ``after``-th forward on."""
    calls = [0]

    def fail(module, args, kwargs):
        calls[0] += 1
        if calls[0] > after:
            raise RuntimeError("out of memory, says the test")

    with hooked(backbone, (backbone.decoder.register_forward_pre_hook, fail), with_kwargs=True):
        yield
