"""The fidelity table: the loss of blind reuse after recall and reorder, and the share a patch restores.

``python -m lab.fidelity --items 500 --format json --output docs/results/fidelity.json``.

Measured through the public window operations on the shipped backbone, on held-out episodes of the
synthetic world. The re-prefill is a fresh window that prefills the same frames in the same order.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
import typer

from kamera import __version__, testbed
from kamera.cli.options import File, Form, Quiet
from kamera.cli.output import Output, listing, nan_to_null
from kamera.engines.hf import HfEngine
from kamera.ops import kv_bytes
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window import KameraWindow
from lab.scorer import OneTokenQuestion, Score, Scorer, answer_logits

HELD_OUT = 900_000
"""Seed of the episodes; the backbone was trained on seeds from a million on."""

KINDS = {"value": "two-hop", "glyph": "one-hop in the frame"}


@dataclass(frozen=True)
class Fidelity:
    """The table, with mean bytes of a patch and of its chunk's KV."""

    scores: tuple[Score, ...]
    rank: int
    episodes: int
    patch_bytes: float
    kv_bytes: float


def measure(
    backbone: HfEngine, *, items: int = 500, rank: int = 16, per_episode: int = 12, seed: int = 0
) -> Iterator[tuple[int, int] | Fidelity]:
    """Run until every row has ``items`` two-hop items; yields (done, wanted), and finally the result.

    Each episode shows three legends and an items frame whose values they define, and asks for values that a
    legend defines (not defaults). Operations and arms:

    * recall: the items frame is evicted and recalled. Blind, the stored patch at ``rank``.
    * reorder: the legends are reversed, so that other ones override. Blind, patch, and the patch of the old
      order ("stale patch").
    * turnover: the items frame is recalled behind three other legends. Blind, the patch of the old legends
      ("stale patch"), a new patch.
    """
    scorer = Scorer(backbone)
    world = testbed.World(HELD_OUT + seed)
    done, episode, sizes = 0, 0, []
    while done < items:
        run = _Episode(backbone, world.episode(episode, layout="LRLLRLI"), rank, per_episode, episode)
        for operation, arms, asked in (run.recall(), run.reorder(), run.turnover()):
            scorer.add(operation, asked, {name: answer_logits(w, asked) for name, w in arms.items()})
        sizes.append(run.sizes)
        done += sum(item.kind == KINDS["value"] for item in run.asked)
        episode += 1
        yield min(done, items), items
    patch, kv = np.mean(sizes, axis=0)
    yield Fidelity(tuple(scorer.scores()), rank, episode, float(patch), float(kv))


class _Episode:
    """One episode's windows. Six legends and an items frame; the first three are its antecedents."""

    def __init__(self, backbone: HfEngine, episode: Any, rank: int, per_episode: int, index: int) -> None:
        self.backbone = backbone
        # uncertified: this measures what a certificate states
        self.policy = ReusePolicy(rank=rank, certified=False, forms="always")
        self.episode = episode
        self.chunks = [backbone.chunk(frame.content) for frame in episode.frames]
        self.per_episode = per_episode
        self.rng = np.random.default_rng([HELD_OUT, index])
        self.store = ChunkStore.open("memory://")
        self.window = self._window(self.store, self.policy, [0, 1, 2, 6])
        self.asked: list[OneTokenQuestion] = []
        self.sizes = self._sizes()

    def recall(self) -> tuple[str, dict[str, KameraWindow], list[OneTokenQuestion]]:
        window = self.window.fork()
        window.evict(3)
        window.recall(self.chunks[6].id)
        self.asked = self._items([0, 1, 2, 6])
        return "recall", self._arms(window, [0, 1, 2, 6]), self.asked

    def reorder(self) -> tuple[str, dict[str, KameraWindow], list[OneTokenQuestion]]:
        order = [2, 1, 0, 6]
        stale = self._stale(order)
        window = self.window.fork()
        window.reorder([2, 1, 0, 3])
        # the first reorder stores the patch; the arm is the second, which runs no forward
        window.reorder([2, 1, 0, 3])
        window.reorder([2, 1, 0, 3])
        return "reorder", self._arms(window, order) | {"stale patch": stale}, self._items(order)

    def turnover(self) -> tuple[str, dict[str, KameraWindow], list[OneTokenQuestion]]:
        order = [3, 4, 5, 6]
        stale = self._stale(order)
        window = self._window(self.store, self.policy, [3, 4, 5])
        window.recall(self.chunks[6].id)
        window.evict(3)
        window.recall(self.chunks[6].id)
        arms = self._arms(window, order) | {"stale patch": stale}
        return "turnover", arms, self._items(order)

    def _arms(self, window: KameraWindow, order: Sequence[int]) -> dict[str, KameraWindow]:
        blind = window.fork()
        blind.condition(3, False)
        fresh = self._window(ChunkStore.open("memory://"), ReusePolicy(minimum="exact"), order)
        return {"re-prefill": fresh, "blind reuse": blind, f"patch, rank {self.policy.rank}": window}

    def _stale(self, order: Sequence[int]) -> KameraWindow:
        """The items frame behind ``order``'s legends under the patch of legends 0, 1, 2."""
        near = replace(self.policy, minimum="near", on_miss="blind", max_divergence=1.0)
        return self._window(self._only_first_patch(), near, order)

    def _only_first_patch(self) -> ChunkStore:
        """A store in which the items frame has one patch: that of the first three legends."""
        store = ChunkStore.open("memory://")
        self._window(store, self.policy, [0, 1, 2, 6])
        return store

    def _window(self, store: ChunkStore, policy: ReusePolicy, order: Sequence[int]) -> KameraWindow:
        window = KameraWindow(self.backbone, store, testbed.SYSTEM, policy=policy)
        for i in order:
            window.append(self.chunks[i])
        return window

    def _items(self, order: Sequence[int]) -> list[OneTokenQuestion]:
        """Two-hop items whose value a legend in ``order`` defines, and as many one-hop ones."""
        asked = [self.episode.ask(*s, order=order) for s in self.episode.subjects(["value"])]
        bound = [q for q in asked if q.bound]
        chosen = self.rng.permutation(len(bound))[: self.per_episode]
        values = [bound[i] for i in chosen]
        glyphs = [self.episode.ask("glyph", q.subject, order=order) for q in values]
        return [OneTokenQuestion(q.text, q.answer, KINDS[q.kind]) for q in (*values, *glyphs)]

    def _sizes(self) -> tuple[int, int]:
        (info,) = [i for i in self.store.ls("exact") if i.chunk_id == self.chunks[6].id]
        record = self.store.get_patch(info.context, info.chunk_id, info.antecedents)
        canonical = self.store.get_canonical(info.context, info.chunk_id)
        assert record is not None and canonical is not None
        return record.patch.nbytes, kv_bytes(canonical.kv)


def fidelity(
    items: Annotated[int, typer.Option(min=1, help="Two-hop questions per row.")] = 500,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the patches.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the held-out episodes.")] = 0,
    format: Form = "table",
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Re-prefill, blind reuse, patch and stale patch after recall, reorder and turnover.

    On the shipped backbone and held-out episodes of its world.
    """
    out = Output(format, output, quiet)
    backbone = HfEngine(*testbed.load())
    with out.progress(items, "question") as bar:
        for step in measure(backbone, items=items, rank=rank, seed=seed):
            if isinstance(step, Fidelity):
                table = step
            else:
                bar.update(step[0] - bar.n)
    document = nan_to_null(
        {
            "command": f"python -m lab.fidelity --items {items} --rank {rank} --seed {seed}",
            "kamera": __version__,
            "backbone": backbone.fingerprint,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            **asdict(table),
        }
    )
    columns = (
        *("after", "question", "arm", "n", "accuracy", "95 %"),
        *("KL", "eta", "agreement", "flip-recover"),
    )
    rows = [
        (
            s.operation,
            s.kind,
            s.arm,
            s.n,
            f"{s.accuracy.mean:.3f}",
            f"{s.accuracy.low:.3f}..{s.accuracy.high:.3f}",
            f"{s.kl:.1e}",
            f"{s.eta:.3f}",
            f"{s.agreement:.3f}",
            f"{s.flip_recover:.3f}",
        )
        for s in table.scores
    ]
    title = (
        f"{table.episodes} episodes, patches of rank {table.rank}: {table.patch_bytes / table.kv_bytes:.1%} "
        "of the chunk's KV bytes"
    )
    out.write(document, [listing(title, columns, rows)])


if __name__ == "__main__":
    typer.run(fidelity)
