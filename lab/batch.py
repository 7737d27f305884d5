"""Tokens per second of answers that are decoded at once, by their number.

    python -m lab.batch [--preset qwen2.5-vl-3b] [--layers 4] [--context 512] [--tokens 12] [--rounds 3]
                        [--sizes 1 2 4 8] [--threads 1] [--device cpu] [--dtype float32] [--output FILE]

A published shape with few layers and random weights; each answer is of a window of its own. Arms take turns
within a round. One more arm answers the largest number without sharing forwards, as windows did before they
met. Clocked from the moment when all have their first token to the last token of the last; every answer must
be the one that its window gives alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from lab.results import keep
from lab.speed.machine import commit, machine
from lab.speed.presets import preset

QUESTION = torch.tensor([11, 12, 13, 14])
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
APART = "apart"
CLOCKS = ("tokens per second", "tokens per processor second")
Clock = tuple[float, float]
"""Seconds on the wall, and of the processor."""
Speeds = dict[str, list[float]]
"""Tokens per second of each round, by clock."""


class _Start:
    """A logits processor that holds an answer's first token until all have theirs, and notes the time."""

    def __init__(self, rows: int) -> None:
        self._together = threading.Barrier(rows, action=self._note)
        self._begun: set[int] = set()
        self.time = (0.0, 0.0)

    def _note(self) -> None:
        self.time = _now()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` as they are."""
        if threading.get_ident() not in self._begun:
            self._begun.add(threading.get_ident())
            self._together.wait()
        return scores


def windows(backbone: HfEngine, count: int, context: int) -> list[KameraWindow]:
    """Windows of about ``context`` tokens, each of another text and length."""
    made, draws, most = [], torch.Generator().manual_seed(0), min(900, backbone.builder.token_count)
    for i in range(count):
        window = KameraWindow(backbone, ChunkStore.open("memory://"), policy=ReusePolicy.exact())
        ids = torch.randint(20, most, (context - 7 * i,), generator=draws)
        window.append(backbone.chunk_from_tensors(ids, label=f"text {i}"))
        made.append(window)
    return made


def _now() -> Clock:
    return time.perf_counter(), time.process_time()


def answered(asked: Sequence[KameraWindow], tokens: int) -> tuple[Clock, list[list[int]]]:
    """Seconds from all first tokens to all last ones, and the answers."""
    start = _Start(len(asked))

    def answer(window: KameraWindow) -> list[int]:
        said: Any = window.generate(QUESTION, max_new_tokens=tokens, logits_processor=[start], **GREEDY)
        return [int(token) for token in said]

    with ThreadPoolExecutor(len(asked)) as pool:
        said = list(pool.map(answer, asked))
    (wall, own), (began, own_began) = _now(), start.time
    return (wall - began, own - own_began), said


def measured(
    backbone: HfEngine, sizes: Sequence[int], context: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Tokens per second by arm, and how many answers were others than alone."""
    made = windows(backbone, max(sizes), context)
    alone = [answered([window], tokens)[1][0] for window in made]
    reason = backbone.steps.why_serial
    arms = [*map(str, sizes), f"{max(sizes)} {APART}"]
    spent: dict[str, list[Clock]] = {arm: [] for arm in arms}
    others = 0
    for i in range(rounds):
        for arm in arms[i % len(arms) :] + arms[: i % len(arms)]:
            rows = int(arm.split()[0])
            backbone.steps._reason = "asked apart" if APART in arm else reason
            seconds, said = answered(made[:rows], tokens)
            spent[arm].append(seconds)
            others += sum(a != b for a, b in zip(said, alone, strict=False))
    backbone.steps._reason = reason
    told = {arm: _told(int(arm.split()[0]) * (tokens - 1), clocks) for arm, clocks in spent.items()}
    one = told[arms[0]]
    results = {arm: {**found, **_times(found, one)} for arm, found in told.items()}
    return {"serial": reason, "answers other than alone": others, "arms": results}


def _times(found: Speeds, one: Speeds) -> dict[str, float]:
    """How many times the tokens of ``one`` there are, in the median of rounds."""
    ratios = {n: [a / b for a, b in zip(found[n], one[n], strict=True)] for n in CLOCKS}
    return {f"{name}, times one": round(statistics.median(ratio), 2) for name, ratio in ratios.items()}


def _told(tokens: int, clocks: Sequence[Clock]) -> Speeds:
    """Tokens per second of each round, on the wall and of the processor."""
    return {name: [round(tokens / c[i], 2) for c in clocks] for i, name in enumerate(CLOCKS)}


def table(document: dict[str, Any]) -> str:
    """The same for people, as Markdown."""
    lines = [f"`{document['command']}`, commit {document['commit']}", ""]
    lines += [
        "| answers at once | " + " | ".join(f"{name} | times one" for name in CLOCKS) + " |",
        "|---" * 5 + "|",
    ]
    for arm, told in document["arms"].items():
        cells = [f"{statistics.median(told[name]):.2f} | {told[f'{name}, times one']}" for name in CLOCKS]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"answers other than alone: {document['answers other than alone']}", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m lab.batch")
    parser.add_argument("--preset", default="qwen2.5-vl-3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked.threads)
    backbone = preset(asked.preset).build(
        asked.layers, dtype=getattr(torch, asked.dtype), device=asked.device
    )
    found = measured(backbone, asked.sizes, asked.context, asked.tokens, asked.rounds)
    words = [f"--{k} {getattr(asked, k)}" for k in ("preset", "layers", "context", "tokens", "rounds")]
    words += [f"--sizes {' '.join(map(str, asked.sizes))} --threads {asked.threads}"]
    words += [f"--device {asked.device} --dtype {asked.dtype}"]
    document = {
        "command": f"python -m lab.batch {' '.join(words)}",
        "commit": commit(),
        "machine": machine(asked.device),
        **found,
    }
    if asked.output is not None:
        keep(document, asked.output)
    print(table(document), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
