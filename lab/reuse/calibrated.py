"""What a calibration lets through on content it never saw, beside the limit that it states.

    python -m lab.reuse.calibrated [--content text] [--cases 160] [--fresh 160] [--bounds 0.05 0.1]
                                   [--output FILE]

Two kinds of content on the shipped backbone: *text* (the text twins of frames, cut as `cases_of` cuts) and
*pictures* (an items frame behind four legends). One is calibrated (`lab.reuse.sweep`) and then asked of
fresh cases: of those that guard and probe accept, how many drift beyond the bound, and how many have
another next token. *Unheld* is what a calibration of 24 cases, none of them held out, would have let
through. At last the text's calibration is shown pictures with one legend replaced: a calibration is of its
own modality only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.reuse import HeldOut
from kamera.reuse.calibration import Calibration, modality
from lab.results import keep
from lab.reuse.sweep import Case, Trial, cases_of, derive, operating_point, replacing, run, tested, windows_of
from lab.speed.machine import commit, machine
from lab.testbed import load

SEED = 910_000
"""First seed of the worlds: held out of training, and not those of other tables."""

DOCUMENT = 500
"""Tokens of a document of text twins."""

LADDER = (0, 64, 112)
"""Lengths of equal left context, of 128 tokens, that text is stored behind."""

UNHELD = 24
"""Cases of a calibration without a held-out half: as many as one had by default."""


def texts(backbone: HfEngine, count: int, seed: int) -> list[Case]:
    """Cases of text twins: legends, renames and items in words, one episode after another."""
    world, documents = testbed.World(seed), list[list[int]]()
    for number in range(max(8, count // 4)):
        ids: list[int] = []
        index = 1_000 * number
        while len(ids) < DOCUMENT:
            frames = world.episode(index, layout="lrl").frames
            ids += backbone.tokenize("".join(frame.text for frame in frames)).tolist()
            index += 1
        documents.append(ids)
    return cases_of(backbone, documents, count=count, ladder=LADDER, seed=seed)


def pictures(backbone: HfEngine, count: int, seed: int) -> list[Case]:
    """Cases of an items frame behind four legends; it was stored behind others, or behind them reordered."""
    world, out = testbed.World(seed), []
    anchor = backbone.chunk_from_tensors(backbone.anchor_ids(testbed.SYSTEM))
    tail = backbone.seams(testbed.SYSTEM).tail
    for index in range(count):
        episode = world.episode(index, layout="LLLLIL")
        shown = [backbone.chunk(frame.content) for frame in episode.frames]
        own, target, other = shown[:4], shown[4], shown[5]
        asked = [episode.ask("value", tag, order=range(5)) for tag in episode.frames[4].glyph_of]
        questions = tuple(backbone.question_ids(q.text, tail) for q in asked if q.bound)[:4]
        others = ((0, (anchor, *own[::-1])), (_tokens(own[1:]), (anchor, other, *own[1:])))
        out.append(Case((anchor, *own), target, questions, others))
    return out


def _tokens(chunks: Sequence[Any]) -> int:
    return sum(chunk.num_tokens for chunk in chunks)


def trials_of(backbone: HfEngine, cases: Sequence[Case]) -> list[list[Trial]]:
    """The trials of each case with all layers reused, those with a replaced piece included."""
    return [
        run(backbone, case, replacing(case, cases[number - 1]), by_depth=False)
        for number, case in enumerate(cases)
    ]


def unheld(trials: Sequence[Sequence[Trial]], bound: float) -> tuple[int | None, float | None]:
    """Equal tokens and threshold fitted to the first cases as they were given, and tested on none."""
    flat = [t for of in trials[:UNHELD] for t in of if not t.replaced]
    least = windows_of(flat, bound)[-1]
    return least, operating_point(flat, [least], bound)


def told(found: HeldOut) -> dict[str, Any]:
    """Counts and limits."""
    return asdict(found) | {"violation limit": found.violation_limit, "flip limit": found.flip_limit}


MAKE: dict[str, Callable[[HfEngine, int, int], list[Case]]] = {"text": texts, "pictures": pictures}

FOREIGN = 24
"""Cases of pictures that the text's calibration is shown."""


def rows(
    backbone: HfEngine, content: str, cases: int, fresh: int, bounds: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """A row for each bound."""
    drawn, later = (MAKE[content](backbone, n, seed) for n, seed in ((cases, SEED), (fresh, SEED + 1)))
    given, new = trials_of(backbone, drawn), trials_of(backbone, later)
    others = pictures(backbone, FOREIGN, SEED + 2) if content == "text" else []
    for bound in bounds:
        made = derive(backbone, drawn, given, bound=bound, model="gqa")
        least, threshold = unheld(given, bound)
        fitted = [t for of in given[: len(given) // 2] for t in of]
        point = operating_point(fitted, made.windows, bound)
        yield {
            "content": content,
            "bound": bound,
            "equal tokens": made.windows[-1],
            "fitted threshold": point,
            "threshold": made.threshold,
            "refusal": made.refusal,
            "held out": told(made.tested),
            "held out, replaced": told(made.replaced),
            "fresh": told(tested(new, made.windows[-1], point, bound)),
            "unheld": {"equal tokens": least, "threshold": threshold},
            "unheld, fresh": told(tested(new, least, threshold, bound)),
            "drift by equal tokens": by_length(new, bound),
            "pictures": {"cases": len(others), "refused": sum(_outside(made, case) for case in others)},
        }


def by_length(trials: Sequence[Sequence[Trial]], bound: float) -> dict[int, dict[str, float]]:
    """Of fresh trials, by the tokens of equal left context: their number, those beyond the bound, flips."""
    flat = [t for of in trials for t in of]
    return {
        length: {
            "trials": len(of),
            "beyond": sum(t.kl[-1] > bound for t in of),
            "flips": sum(not t.agrees for t in of),
            "worst": max(t.kl[-1] for t in of),
        }
        for length in sorted({t.matched for t in flat})
        for of in [[t for t in flat if t.matched == length]]
    }


def _outside(made: Calibration, case: Case) -> bool:
    """True if a calibration refuses a case since its kind was not measured."""
    return made.outside(case.chunk, map(modality, case.before)) is not None


def main() -> None:
    """Print the rows, and keep them."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.calibrated")
    parser.add_argument("--content", choices=MAKE, default="text")
    parser.add_argument("--cases", type=int, default=160)
    parser.add_argument("--fresh", type=int, default=160)
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    backbone = HfEngine(*load("gqa"))
    bounds = " ".join(f"{b:g}" for b in asked.bounds)
    found = {
        "command": f"python -m lab.reuse.calibrated --content {asked.content} --cases {asked.cases} "
        f"--fresh {asked.fresh} --bounds {bounds}",
        "commit": commit(),
        "machine": machine(),
        "rows": list(rows(backbone, asked.content, asked.cases, asked.fresh, asked.bounds)),
    }
    print(json.dumps(found["rows"], indent=1))
    if asked.output is not None:
        keep(found, asked.output)


if __name__ == "__main__":
    main()
