"""The whole time to a first token: a question behind a window that has just changed.

Two changes. A segment comes back to the tail: Kamera recalls it, everyone else computes it. And the
oldest chunk leaves the front: Kamera slides, a prefix cache keeps what stands before the change (the
system prompt) and prefills what stands after it again; nothing that keys KV by its prefix can do better.

Kamera runs through `KameraWindow`, from store to logits. The others run as bare as they can: no store
and no bookkeeping, the KV of what stands in front given, segment and question in one forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kamera.content import Chunk, Encoded
from kamera.content.chunk import TOKEN_TYPES
from kamera.engines.hf import HfEngine, forwards
from kamera.engines.hf.encode import decoder_arguments, with_batch
from kamera.engines.hf.model import ModelCache
from kamera.ops import relocate_kv
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window import KameraWindow
from lab.recompute import recompute
from lab.speed.content import noise_kv, picture_chunk, words
from lab.speed.presets import Preset, preset
from lab.speed.settings import Settings, Step, unwatched
from lab.speed.table import Result, Row, Section, model_facts, preset_line, result, times
from lab.speed.timing import Arm, measure

ANCHOR, CONTEXT, QUESTION = 16, 512, 32
"""Tokens of the system prompt, of the chunk that stands there, and of the question."""

MEMORY = "64GiB"
"""More than any preset's chunks take: nothing leaves the store."""

RECOMPUTED = 0.15
"""Share of the tokens that CacheBlend (arXiv:2405.16444) computes again."""

BACK, GONE = "a segment comes back", "the oldest leaves"


def run(settings: Settings, step: Step = unwatched) -> Result:
    """One row per length, change and way."""
    shape = preset(settings.preset)
    backbone = settings.build(shape)
    rows: list[Row] = []
    for done, length in enumerate(settings.lengths):
        step(done, len(settings.lengths))
        rows += Scene(shape, backbone, length).measured(settings)
    step(len(settings.lengths), len(settings.lengths))
    title = f"First token of an answer to {QUESTION} tokens behind a window that has just changed"
    notes = (
        f"{BACK}: behind {ANCHOR} + {CONTEXT} tokens, whose KV every way has",
        f"{GONE}: {CONTEXT} tokens leave the front, the segment stays; a prefix cache keeps {ANCHOR} tokens",
        f"15 % recompute: {RECOMPUTED:.0%} of the segment's tokens at every layer, as CacheBlend does from "
        "its third layer on; the first two, which it runs in full, and its choice are not charged",
        "re-prefill: embeddings given, segment and question in one forward; full recompute: the vision tower "
        "too; both behind the KV of what stands in front, the best a prefix cache can do for the tail",
        "question alone: the floor, nothing has changed; times as long: as Kamera in the same rounds",
    )
    return result("serve", settings, model_facts(shape, backbone), [Section(title, tuple(rows))], notes)


def page(documents: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    """For docs/results/speed.md: one table per change, one line per preset and length."""
    for change in (BACK, GONE):
        lines: list[Row] = []
        for document in documents:
            rows = [row for row in document["sections"][0]["rows"] if row["change"] == change]
            for tokens in dict.fromkeys(row["tokens"] for row in rows):
                ways = [row for row in rows if row["tokens"] == tokens]
                line = {"preset": preset_line(document), "tokens": tokens, "kamera ms": ways[0]["ms"]}
                lines.append(line | {f"{row['way']}, times": row["times as long"] for row in ways[1:]})
        yield Section(change.capitalize(), tuple(lines))


class Scene:
    """One length: a window through the public interface, and the bare prefills beside it."""

    def __init__(self, shape: Preset, backbone: HfEngine, length: int) -> None:
        self.backbone, self.length = backbone, length
        self.context = picture_chunk(backbone, shape, CONTEXT, seed=1)
        self.segment = picture_chunk(backbone, shape, length, seed=2)
        self.system, self.question = words(backbone, ANCHOR, seed=3), words(backbone, QUESTION, seed=4)
        self.store = ChunkStore.open("memory://", memory_limit=MEMORY)
        first = self._window()
        first.append(self.context)
        first.append(self.segment)
        self.window = self.holding(self.context, self.segment)
        pixels = {n: t for n, t in self.segment.inputs.items() if n not in TOKEN_TYPES}
        ids = torch.cat((self.segment.input_ids, self.question))
        self.asked = backbone.chunk_from_tensors(ids, label="segment and question", **pixels)
        self.encoded = backbone.encode(self.asked)
        self.before = noise_kv(backbone, ANCHOR + CONTEXT, seed=5)
        self.canonical = noise_kv(backbone, length + QUESTION, seed=6)
        self.anchor = noise_kv(backbone, ANCHOR, seed=7)
        self.back = self._places(self.context, self.asked)
        self.gone = self._places(self.asked)

    def measured(self, settings: Settings) -> list[Row]:
        changes = {
            BACK: [
                Arm("kamera", self.recall, self.away),
                Arm("re-prefill", self.reprefill, self.behind_context),
                Arm("full recompute", self.full, self.behind_context),
                Arm("15 % recompute", self.some),
                Arm("question alone", lambda window: window.next_token_logits(self.question), self.here),
            ],
            GONE: [
                Arm("kamera, slide", self.slide, self.both),
                Arm(
                    "prefix cache",
                    self.after_anchor,
                    lambda: forwards.make_cache(self.backbone, [self.anchor]),
                ),
            ],
        }
        timed = measure(
            [arm for arms in changes.values() for arm in arms],
            settings.device,
            rounds=settings.rounds,
            min_rounds=settings.min_rounds,
            seconds=settings.seconds,
        )
        rows: list[Row] = []
        for change, arms in changes.items():
            for arm in arms:
                rows.append(
                    {
                        "tokens": self.length,
                        "change": change,
                        "way": arm.name,
                        **times(timed, arm.name),
                        "times as long": None if arm is arms[0] else timed.ratio(arm.name, arms[0].name),
                    }
                )
        return rows

    # -- Kamera --------------------------------------------------------------------------------

    def _window(self) -> KameraWindow:
        # random weights have no certificate; what is served here is looked at by nobody
        return KameraWindow(
            self.backbone, self.store, self.system, policy=ReusePolicy(certified=False, forms="always")
        )

    def holding(self, *chunks: Chunk) -> KameraWindow:
        """A window of stored chunks whose live cache has been asked."""
        window = self._window()
        for chunk in chunks:
            report = window.recall(chunk.id)
            if report.forwards:
                raise RuntimeError(f"recall ran {report.forwards} forwards: it should have found all stored")
        window.next_token_logits(self.question)
        return window

    def both(self) -> KameraWindow:
        """A window of its own with context and segment, asked before."""
        return self.holding(self.context, self.segment)

    def away(self) -> KameraWindow:
        """The window as it is before the segment comes back."""
        if len(self.window) == 2:
            self.window.evict(1)
        self.window.next_token_logits(self.question)
        return self.window

    def here(self) -> KameraWindow:
        """The window with the segment in it, asked before."""
        if len(self.window) == 1:
            self.window.recall(self.segment.id)
        self.window.next_token_logits(self.question)
        return self.window

    def recall(self, window: KameraWindow) -> torch.Tensor:
        window.recall(self.segment.id)
        return window.next_token_logits(self.question)

    def slide(self, window: KameraWindow) -> torch.Tensor:
        window.slide()
        return window.next_token_logits(self.question)

    # -- the others ----------------------------------------------------------------------------

    def behind_context(self) -> ModelCache:
        return forwards.make_cache(self.backbone, [self.before])

    def reprefill(self, cache: ModelCache) -> torch.Tensor:
        return self._logits(self._hidden(self.encoded, self.back, cache))

    def full(self, cache: ModelCache) -> torch.Tensor:
        return self._logits(self._hidden(self.backbone.encode(self.asked), self.back, cache))

    def some(self) -> torch.Tensor:
        """The canonical moved to its place; some of its tokens computed again there, with the question."""
        count = math.ceil(RECOMPUTED * self.length)
        chosen = torch.linspace(0, self.length - 1, count).long()
        rows = torch.cat((chosen, torch.arange(self.length, self.length + QUESTION)))
        offset = (self.back - self.gone)[:, 0].tolist()
        held = relocate_kv(self.canonical, self.backbone.layout, offset)
        made = recompute(self.backbone, self.encoded, self.back, self.before, held, rows)
        some = next(t for layer in made.kv for t in layer.values())
        # its last hidden state is not given back; any other costs the head as much
        return self._logits(some.new_zeros(1, 1, self.backbone.config.hidden_size))

    def after_anchor(self, cache: ModelCache) -> torch.Tensor:
        return self._logits(self._hidden(self.encoded, self.gone, cache))

    def _hidden(self, encoded: Encoded, positions: torch.Tensor, cache: ModelCache) -> torch.Tensor:
        """Segment and question through the decoder in one forward."""
        device = self.backbone.model.device
        arguments = decoder_arguments(encoded, device) | {
            "position_ids": with_batch(positions).to(device),
            "past_key_values": cache,
            "use_cache": True,
        }
        with torch.no_grad():
            hidden: torch.Tensor = self.backbone.decoder(**arguments).last_hidden_state
        return hidden[:, -1:]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.backbone.model.get_output_embeddings()(hidden)
        return logits[0, -1]

    def _places(self, *chunks: Chunk) -> torch.Tensor:
        """Positions of the last of ``chunks`` behind the system prompt."""
        ids = [self.system, *[c.input_ids for c in chunks]]
        whole = self.backbone.positions(ids, [{}, *[c.position_inputs() for c in chunks]])
        return whole[:, -chunks[-1].num_tokens :]
