"""``python -m lab.streaming``: a stream of frames under every way of keeping a window, and what it cost.

Questions are asked at every step once frames have left: about facts that stay, facts that the departure
changed, and facts that only departed frames state. ``right`` is against the truth (`lab.streaming.stream`),
``agree`` and ``kl`` against `recent`, which prefills the window anew. Costs are those of `see`, a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kamera import testbed
from kamera.certify import bootstrap, kl
from kamera.engines.hf import HfEngine
from kamera.eval.arms import Blind, Maker
from kamera.eval.desk import Desk
from kamera.patches import Anchor
from lab.baselines.windows import ARMS
from lab.speed.machine import commit, machine
from lab.streaming.adapted import Adapted
from lab.streaming.eraser import SAMPLES, Erased, Eraser, train
from lab.streaming.ours import Windowed
from lab.streaming.rivals import Keeper, Recent, ReKV, Streaming
from lab.streaming.stream import FRAMES, HELD_OUT, KINDS, Asked, questions
from lab.testbed import load

REFERENCE = "recent"
PLACED: dict[str, Maker] = {
    "blind": Blind,
    **{name: ARMS[name] for name in ("cacheblend@15%", "vlcache@2%", "vlcache@5%", "conduit@10%")},
}
"""Reuse of canonicals, and repairs of it (`lab.baselines.windows`)."""


NAMES = (
    *(REFERENCE, "exact", "streaming_vlm", "survivor", "appended", "repair", "rekv", "recall"),
    *PLACED,
    "kveraser",
)
"""Every way of keeping a stream."""


def arms(desk: Desk, window: int, names: Sequence[str], eraser: Eraser | None = None) -> dict[str, Keeper]:
    """These ways of keeping a stream; ``kveraser`` needs the ``eraser``."""
    backbone, anchor = desk.backbone, desk.anchor

    def streaming(contiguous: bool = True) -> Streaming:
        return Streaming(backbone, anchor, window, contiguous)

    def adapted(name: str) -> Callable[[], Keeper]:
        return lambda: Adapted(Desk(desk.backbone, desk.system, desk.anchor), PLACED[name], window)

    makers: dict[str, Callable[[], Keeper]] = {
        REFERENCE: lambda: Recent(backbone, anchor, window),
        "exact": lambda: Windowed(backbone, window, "exact"),
        "streaming_vlm": streaming,
        "survivor": lambda: Windowed(backbone, window, "keep"),
        "appended": lambda: streaming(contiguous=False),
        "repair": lambda: Windowed(backbone, window, "repair"),
        "rekv": lambda: ReKV(streaming(), window),
        "recall": lambda: Windowed(backbone, window, "repair", recalls=True),
        **{name: adapted(name) for name in PLACED},
    }
    if eraser is not None:
        makers["kveraser"] = lambda: Erased(backbone, anchor, window, eraser)
    return {name: makers[name]() for name in names}


def run(
    backbone: HfEngine,
    episodes: int,
    window: int,
    most: int,
    seed: int,
    names: Sequence[str] = NAMES,
    samples: int = SAMPLES,
) -> dict[str, Any]:
    """Ask every arm the same questions at the same moments; ``samples`` train the eraser.

    Raises ValueError for an unknown arm, and for arms without `REFERENCE`.
    """
    if REFERENCE not in names or not set(names) <= set(NAMES):
        raise ValueError(f"arms {', '.join(names)}: give {REFERENCE} and others of {', '.join(NAMES)}")
    desk = Desk(backbone, testbed.SYSTEM)
    anchor = desk.anchor
    eraser: Eraser | None = None
    losses: list[float] = []
    if "kveraser" in names:
        eraser, losses = train(backbone, anchor, window, samples)
    rows: dict[str, list[dict[str, Any]]] = {}
    costs: dict[str, dict[str, float]] = {}
    steps = 0
    for index in range(episodes):
        episode = testbed.World(HELD_OUT + seed).episode(index, layout=FRAMES[index % len(FRAMES)])
        keepers = arms(desk, window, names, eraser)
        for seen, frame in enumerate(episode.frames, 1):
            chunk = backbone.chunk(frame.content)
            for name, keeper in keepers.items():
                with backbone.measure() as work:
                    keeper.see(chunk)
                if seen > window:
                    spent = costs.setdefault(name, {"tokens": 0, "encodes": 0, "forwards": 0})
                    spent["tokens"] += keeper.computed if isinstance(keeper, Adapted) else work.tokens
                    spent["encodes"] += work.vision_encodes
                    spent["forwards"] += work.forwards
            if seen > window:
                steps += 1
                for asked in questions(episode, seen, window, most, seed):
                    _ask(backbone, anchor, keepers, asked, rows)
    return {
        "steps": steps,
        "eraser": {"samples": samples, "KL by epoch": losses},
        "arms": {name: _summary(found, costs[name], steps) for name, found in rows.items()},
        "claims": _claims(rows),
    }


def _ask(
    backbone: HfEngine,
    anchor: Anchor,
    keepers: dict[str, Keeper],
    asked: Asked,
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    ids = backbone.builder.tokenize(asked.text + anchor.tail)
    truth = int(backbone.builder.tokenize(asked.truth)[0])
    said = {name: keeper.logits(ids).float().cpu() for name, keeper in keepers.items()}
    reference = said[REFERENCE]
    for name, logits in said.items():
        rows.setdefault(name, []).append(
            {
                "kind": asked.kind,
                "right": float(int(logits.argmax()) == truth),
                "agree": float(int(logits.argmax()) == int(reference.argmax())),
                "kl": kl(logits, reference),
                "choice": int(logits.argmax()),
                "off recent": float((logits - reference).abs().max()),
            }
        )


def _summary(found: list[dict[str, Any]], spent: dict[str, float], steps: int) -> dict[str, Any]:
    out: dict[str, Any] = {f"{name} a step": count / steps for name, count in spent.items()}
    for kind in KINDS:
        some = [row for row in found if row["kind"] == kind]
        if some:
            out[kind] = {"n": len(some), "right": vars(bootstrap([r["right"] for r in some]))}
            out[kind] |= {what: sum(r[what] for r in some) / len(some) for what in ("agree", "kl")}
    return out


def _claims(rows: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Exact is `recent`, a survivor is StreamingVLM's frame: by how much that fails to hold."""
    found = {}
    if "exact" in rows:
        off = max(r["off recent"] for r in rows["exact"])
        found["exact, largest difference of a logit to recent"] = off
    if {"survivor", "streaming_vlm"} <= rows.keys():
        pairs = list(zip(rows["survivor"], rows["streaming_vlm"], strict=True))
        same = sum(ours["choice"] == theirs["choice"] for ours, theirs in pairs) / len(pairs)
        apart = max(abs(ours["kl"] - theirs["kl"]) for ours, theirs in pairs)
        found["survivor, share of answers that are streaming_vlm's"] = same
        found["survivor, largest difference of KL to streaming_vlm's"] = apart
    return found


def table(document: dict[str, Any]) -> str:
    """The same for people, as Markdown."""
    lines = [f"`{document['command']}`, commit {document['commit']}", ""]
    lines.append(
        "| arm | " + " | ".join(f"{k}: right (KL)" for k in KINDS) + " | tokens | encodes | forwards |"
    )
    lines.append("|---" * (4 + len(KINDS)) + "|")
    for name, arm in document["results"]["arms"].items():
        cells = []
        for kind in KINDS:
            cell = arm.get(kind)
            cells.append(f"{cell['right']['mean']:.3f} ({cell['kl']:.2f})" if cell else "–")
        cells += [f"{arm[f'{what} a step']:,.1f}" for what in ("tokens", "encodes", "forwards")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{claim}: {value:.3g}" for claim, value in document["results"]["claims"].items())]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m lab.streaming", description=__doc__)
    parser.add_argument("--family", default="gqa", help="a trained backbone of the testbed")
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--window", type=int, default=4, help="frames in view")
    parser.add_argument("--questions", type=int, default=4, help="of each kind, at most, at each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", default=",".join(NAMES), help="ways of keeping, separated by commas")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, help="write there instead of to stdout")
    asked = parser.parse_args(arguments)
    names = [name.strip() for name in asked.arms.split(",")]
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"arm {unknown[0]!r} is none of {', '.join(NAMES)}")
    torch.set_num_threads(1)
    backbone = HfEngine(*load(asked.family))
    command = f"python -m lab.streaming --family {asked.family} --episodes {asked.episodes}"
    command += f" --window {asked.window} --questions {asked.questions} --seed {asked.seed}"
    command += "" if tuple(names) == NAMES else f" --arms {','.join(names)}"
    document: dict[str, Any] = {"command": command, "commit": commit(), "machine": machine()}
    document["results"] = run(backbone, asked.episodes, asked.window, asked.questions, asked.seed, names)
    text = json.dumps(document, indent=1) if asked.format == "json" else table(document)
    if asked.output is None:
        print(text)
    else:
        asked.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
