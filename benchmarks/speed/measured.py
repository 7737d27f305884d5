"""The three tables: the operator alone, operations of a window, and the whole time to a first token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.report import Row
from benchmarks.shapes import Preset, preset
from benchmarks.speed.content import noise_kv, noise_patch, picture_chunk, words
from benchmarks.speed.timing import Arm, Measured, measure
from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine, forwards
from kamera.ops import code_kv, kv_bytes, kv_slice
from kamera.ops.kernels import serve as apply_to

ANCHOR, CONTEXT, QUESTION = 16, 512, 32
"""Tokens of the system prompt, of what stands in front of a chunk, and of a question."""


@dataclass(frozen=True)
class Settings:
    """One run: a shape cut to ``layers`` (None: all), tokens of a chunk, chunks of a window, rounds.

    In float32, as a prefill in bfloat16 is slow beyond all use on processors that have no such products.
    """

    preset: str = "qwen2.5-vl-3b"
    layers: int | None = 2
    lengths: tuple[int, ...] = (256, 1024)
    chunks: int = 8
    device: str = "cpu"
    dtype: str = "float32"
    rounds: int = 10
    seconds: float = 20.0

    def build(self) -> tuple[Preset, HfEngine]:
        """The shape and its model."""
        shape = preset(self.preset)
        return shape, shape.build(self.layers, dtype=getattr(torch, self.dtype), device=self.device)

    def measure(self, arms: list[Arm]) -> Measured:
        """All arms, in turn."""
        return measure(
            arms, self.device, rounds=self.rounds, min_rounds=min(3, self.rounds), seconds=self.seconds
        )


def apply(settings: Settings) -> Iterator[Row]:
    """A chunk into its slot, against a forward over its tokens and a plain copy of as many bytes."""
    _, backbone = settings.build()
    layout, device = backbone.layout, torch.device(settings.device)
    for length in settings.lengths:
        canonical, context = noise_kv(backbone, length, seed=2), noise_kv(backbone, CONTEXT, seed=1)
        slot = kv_slice(forwards.allocate_kv(backbone, CONTEXT + length), CONTEXT, CONTEXT + length)
        patch, plain, offset = noise_patch(canonical, layout), kv_bytes(canonical), [CONTEXT] * backbone.axes
        coded = code_kv(canonical, "int8").to([device] * len(canonical.groups))
        ways = {
            "patched": (canonical, patch, 2 * plain + patch.nbytes),
            "blind": (canonical, None, 2 * plain),
            "patched, int8": (coded, patch, coded.nbytes + plain + patch.nbytes),
        }
        chunk = backbone.encode(backbone.chunk_from_tensors(words(backbone, length)))
        places = torch.arange(CONTEXT, CONTEXT + length).expand(backbone.axes, -1)
        arms = [
            Arm(
                "re-prefill",
                partial(forwards.run, backbone, chunk, places),
                partial(forwards.make_cache, backbone, [context]),
            )
        ]
        paths = {}
        for name, (kv, factors, moved) in ways.items():
            run = partial(apply_to, slot, kv, factors, layout, offset)
            paths[name] = run()  # compiles what has to be, too
            arms.append(Arm(name, run))
            arms.append(_copy(f"copy, {name}", moved, device))
        timed = settings.measure(arms)
        yield {"tokens": length, "way": "re-prefill", "ms": _ms(timed, "re-prefill")}
        for name, (_, _, moved) in ways.items():
            yield {
                "tokens": length,
                "way": name,
                "ms": _ms(timed, name),
                "times faster": timed.ratio("re-prefill", name),
                "share of copy": timed.ratio(f"copy, {name}", name),
                "moved MB": moved / 1e6,
                "path": str(paths[name]),
            }


def window(settings: Settings) -> Iterator[Row]:
    """Each operation of a full window, against a forward over all of its tokens."""
    shape, backbone = settings.build()
    for length in settings.lengths:
        deck = Deck(shape, backbone, length, settings.chunks)
        encoded = [backbone.encode(chunk) for chunk in deck.chunks[: settings.chunks]]
        places = deck.places(settings.chunks)
        arms = [Arm("re-prefill", lambda encoded=encoded, places=places: backbone.prefill(encoded, places))]
        arms += [Arm(name, operation, deck.fork) for name, operation in deck.operations().items()]
        timed = settings.measure(arms)
        for arm in arms:
            faster = None if arm.name == "re-prefill" else timed.ratio("re-prefill", arm.name)
            row = {"tokens": length, "chunks": settings.chunks, "operation": arm.name}
            yield {**row, "ms": _ms(timed, arm.name), "times faster": faster}


def serve(settings: Settings) -> Iterator[Row]:
    """The first token of an answer behind a window that has just changed."""
    shape, backbone = settings.build()
    for length in settings.lengths:
        deck = Deck(shape, backbone, length, 2)
        plain = Deck(shape, backbone, length, 2, ReusePolicy.exact())
        spare, picture = deck.spare.id, deck.spare

        def asked(*before: Callable[[KameraWindow], Any], deck: Deck = deck) -> Callable[..., Any]:
            def run(window: KameraWindow) -> list[Any]:
                return [*(act(window) for act in before), window.next_token_logits(deck.question)]

            return run

        def recall(window: KameraWindow, spare: str = spare) -> Any:
            return window.recall(spare)

        def encode(window: KameraWindow, picture: Chunk = picture) -> Any:
            return backbone.encode(picture)

        slide = KameraWindow.slide
        changes = {
            "a chunk comes back": [
                Arm("Kamera", asked(recall), deck.fork),
                Arm("re-prefill", asked(recall), plain.fork),
                Arm("full recompute", asked(encode, recall), plain.fork),
                Arm("question alone", asked(), deck.fork),
            ],
            "the oldest leaves": [
                Arm("Kamera, slide", asked(slide), deck.fork),
                Arm("prefix cache", asked(slide), plain.fork),
            ],
        }
        timed = settings.measure([arm for arms in changes.values() for arm in arms])
        for change, arms in changes.items():
            for arm in arms:
                longer = None if arm is arms[0] else timed.ratio(arm.name, arms[0].name)
                row = {"tokens": length, "change": change, "way": arm.name, "ms": _ms(timed, arm.name)}
                yield {**row, "times as long": longer}


class Deck:
    """A window of ``count`` pictures whose operations have been done once, so that all is stored."""

    def __init__(
        self,
        shape: Preset,
        backbone: HfEngine,
        length: int,
        count: int,
        policy: ReusePolicy | None = None,
    ) -> None:
        self.backbone, self.length = backbone, length
        self.chunks = [picture_chunk(backbone, shape, length, seed=i) for i in range(count + 1)]
        self.spare = self.chunks[-1]
        self.question, self.system = words(backbone, QUESTION, seed=4), words(backbone, ANCHOR, seed=3)
        store = ChunkStore.open("memory://", memory_limit="64GiB")
        self._window = KameraWindow(backbone, store, self.system, policy=policy or ReusePolicy())
        for chunk in self.chunks:
            self._window.append(chunk)
        self._window.evict(count)  # the spare one is stored, and comes back
        for operation in self.operations().values():
            operation(self.fork())
            self._window.flush()

    def fork(self) -> KameraWindow:
        """The window again, asked before."""
        made = self._window.fork()
        made.next_token_logits(self.question)
        return made

    def operations(self) -> dict[str, Callable[[KameraWindow], Any]]:
        """By name; each is given a `fork`."""
        count = len(self.chunks) - 1
        tail = [*range(count - 2), count - 1, count - 2]
        return {
            "slide": lambda window: window.slide(),
            "recall": lambda window: window.recall(self.spare.id),
            "evict in the middle": lambda window: window.evict(count // 2),
            "reorder the tail": lambda window: window.reorder(tail),
            "fork": lambda window: window.fork(),
        }

    def places(self, count: int) -> list[torch.Tensor]:
        """Positions of the first chunks behind the system prompt, ``[axes, tokens]`` each."""
        chunks = self.chunks[:count]
        whole = self.backbone.positions(
            [self.system, *[c.input_ids for c in chunks]], [{}, *[c.position_inputs() for c in chunks]]
        )
        return list(whole[:, ANCHOR:].split(self.length, dim=1))


def _copy(name: str, moved: int, device: torch.device) -> Arm:
    """A plain copy that reads ``moved / 2`` bytes and writes as many: what memory would let an arm have."""
    source = torch.ones(max(1, moved // 2), dtype=torch.uint8, device=device)  # zeros might be one page
    into = torch.zeros_like(source)
    return Arm(name, lambda: into.copy_(source))


def _ms(timed: Measured, arm: str) -> Any:
    return timed.spread(arm).times(1e3)
