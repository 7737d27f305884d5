"""Time to the first token of a prompt whose long body moved behind another header: every way, in one run.

    python -m lab.reuse.ttft [--body 1024] [--rounds 5] [--output FILE]

A prompt is a sink, a header that is new in every round, a body that is stored, and a question. Ways:
no cache; a prefix cache (the sink alone is common); CacheBlend with 15 % of the tokens; boundary states
at half depth (the upper half of the layers runs for the body: timed as a model of half the layers); and a
`Reuser` per tier: a miss that is stored, ``patched`` (this header was seen) and ``exact`` (the last window
still holds the prompt). Weights are random: only shapes decide times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.ops import kv_concat, kv_of
from kamera.patches import prefill_anchor
from kamera.reuse import Prompt, Reuser
from lab.baselines.cacheblend import CacheBlend
from lab.baselines.rows import tokens_afforded
from lab.results import keep
from lab.reuse.forwards import answered, places, prefilled
from lab.scene import Scene
from lab.speed.machine import commit, machine

LAYERS, WIDTH, VOCABULARY = 8, 256, 4096
SINK, HEADER, QUESTION = 4, 48, 16
SHARE = 0.15
POLICY = ReusePolicy(certified=False, forms="always")


def model(layers: int) -> HfEngine:
    """A grouped-query decoder of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    return HfEngine(LlamaForCausalLM(config).eval())


class Rig:
    """The prompts of one measurement, and the ways to their first token."""

    def __init__(self, body: int) -> None:
        self.backbone, self.half = model(LAYERS), model(LAYERS // 2)
        self._draw = torch.Generator().manual_seed(1)
        self.sink, self.body, self.question = self.words(SINK), self.words(body), self.words(QUESTION)
        anchor = prefill_anchor(self.backbone, self.sink)
        self.root = Scene(
            self.backbone,
            anchor,
            [self.backbone.chunk_from_tensors(self.words(HEADER))],
            self.chunk(self.body),
        )
        _ = self.root.canonical
        self.rank = next(rank for rank in range(1, body) if tokens_afforded(self.root, rank) >= SHARE * body)

    def words(self, count: int) -> torch.Tensor:
        """New random tokens."""
        return torch.randint(3, VOCABULARY, (count,), generator=self._draw)

    def chunk(self, ids: torch.Tensor) -> Any:
        """A chunk of text ids."""
        return self.backbone.chunk_from_tensors(ids)

    def prompt(self, header: torch.Tensor) -> Prompt:
        """The prompt with this header."""
        ids = torch.cat([self.sink, header, self.body, self.question])
        borders = (SINK, SINK + HEADER, len(ids) - QUESTION)
        return Prompt.of(ids.numpy(), anchors=borders)

    @property
    def ways(self) -> dict[str, Callable[[torch.Tensor], None]]:
        """The ways that are not Kamera's, by name."""
        return {
            "no cache": self.nothing,
            "prefix cache": self.prefix,
            "CacheBlend 15 %": self.cacheblend,
            "boundary states, half depth": self.boundary,
        }

    def nothing(self, header: torch.Tensor) -> None:
        """The whole prompt in one forward."""
        ids = torch.cat([self.sink, header, self.body, self.question])
        with torch.no_grad():
            self.backbone.model(input_ids=ids[None], logits_to_keep=1)

    def prefix(self, header: torch.Tensor) -> None:
        """All behind the sink, whose KV is held."""
        ids = torch.cat([header, self.body, self.question])
        _, at = places(self.backbone, [SINK, len(ids)])
        answered(self.backbone, ids, at, [self.root.anchor.kv])

    def cacheblend(self, header: torch.Tensor) -> None:
        """The header prefilled, 15 % of the body recomputed."""
        scene = self.root.behind([self.chunk(header)])
        kv = CacheBlend(self.rank).serve(scene).kv
        scene.logits(kv, [self.question])

    def boundary(self, header: torch.Tensor) -> None:
        """The header through all layers, the body through half of them."""
        lengths = [SINK, HEADER, len(self.body), QUESTION]
        _, at_header, at_body, at_question = places(self.backbone, lengths)
        anchor = self.root.anchor.kv
        head = prefilled(self.backbone, header, at_header, [anchor])
        upper = LAYERS // 2
        behind = [kv_of(kv[upper:], self.half.groups) for kv in (anchor, head)]
        above = prefilled(self.half, self.body, at_body, behind)
        whole = kv_of([*self.root.blind[:upper], *above], self.backbone.groups)
        answered(self.backbone, self.question, at_question, [kv_concat([anchor, head]), whole])


def reused(reuser: Reuser, prompt: Prompt, tier: str) -> None:
    """The prompt through a `Reuser`, whose body must be of this tier."""
    done = reuser.prepare(prompt).run()
    assert done.admissions[-1].tier == tier, done.admissions[-1]
    done.window.next_token_logits(done.question)


def measure(body: int, rounds: int) -> dict[str, Any]:
    """Median seconds of every way, rounds interleaved, and ratios to no cache."""
    rig = Rig(body)
    backbone = rig.backbone
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        work()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    for number in range(rounds + 1):
        header, store = rig.words(HEADER), ChunkStore.open("memory://")
        for name, way in rig.ways.items():
            timed(name, partial(way, header))
        prompt = rig.prompt(header)
        first = Reuser(backbone, store, POLICY, sink=SINK)
        timed("Kamera, a miss that is stored", partial(reused, first, prompt, "none"))
        timed("Kamera, exact", partial(reused, first, prompt, "exact"))
        again = Reuser(backbone, store, POLICY, sink=SINK)
        timed("Kamera, patched", partial(reused, again, prompt, "patched"))
        if number == 0:
            seconds.clear()  # warm-up
    medians = {name: statistics.median(held) for name, held in seconds.items()}
    base = medians["no cache"]
    rows = [
        {"way": name, "seconds": value, "times faster than no cache": base / value}
        for name, value in medians.items()
    ]
    shape = {"layers": LAYERS, "width": WIDTH, "kv heads": 4, "sink": SINK, "header": HEADER, "body": body}
    return {"shape": shape | {"question": QUESTION}, "rounds": rounds, "rows": rows}


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.ttft")
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(asked.body, asked.rounds)
    for row in found["rows"]:
        print(f"{row['way']:32} {row['seconds']:8.3f} s {row['times faster than no cache']:8.2f}")
    if asked.output is not None:
        command = f"python -m lab.reuse.ttft --body {asked.body} --rounds {asked.rounds}"
        document = {"command": command, "commit": commit(), "machine": machine(), **found}
        keep(document, asked.output)


if __name__ == "__main__":
    main()
