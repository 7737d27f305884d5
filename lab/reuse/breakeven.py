"""After how many reuses a stored segment has repaid what storing it cost, per tier and form of the store.

    python -m lab.reuse.breakeven [--body 1024] [--rounds 5] [--output FILE]

The prompts are those of `lab.reuse.ttft`: a sink, a new header, a body, a question. The first time a body
is seen it is prefilled, and stored with its patches behind that header: ``invested`` are the seconds that
this takes longer than a prefill without any cache. A reuse saves the difference between a prefill and its own
time to the first token. f* = invested / saved is the number of reuses that repay it; what comes back less
often should not be stored. Stores are a directory, opened anew before each reuse, so a reuse pays reading,
verifying and decoding: KV as computed, and in codes of 8 and 4 bits. ``proved`` is the default policy, whose
patches are checked against the true KV before they serve. ``exact`` takes nothing out of a store: its session
is live.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from kamera import ChunkStore, ReusePolicy
from kamera.reuse import Reused, Reuser
from lab.results import keep
from lab.reuse.ttft import HEADER, POLICY, SINK, Rig
from lab.speed.machine import commit, machine

Form = Literal["as-is", "int8", "int4"]

FORMS: tuple[Form, ...] = ("as-is", "int8", "int4")
PROVED = ReusePolicy(forms="always")


@dataclass
class Clock:
    """Seconds of each way, one entry per round."""

    held: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns."""
        started = time.perf_counter()
        done = work()
        self.held.setdefault(name, []).append(time.perf_counter() - started)
        return done

    def median(self, name: str) -> float:
        """Of all rounds."""
        return statistics.median(self.held[name])


@dataclass(frozen=True)
class Row:
    """One tier out of one form of store.

    ``invested`` and ``saved`` in seconds; ``f_star`` reuses (None: a reuse saves nothing), ``bytes`` the
    objects of the body as stored, canonicals and patches.
    """

    form: str
    tier: str
    invested: float
    saved: float
    f_star: float | None
    bytes: int


def first_token(reuser: Reuser, prompt: Any) -> Reused:
    """The prompt served, and the logits of its first answer token."""
    done = reuser.prepare(prompt).run()
    done.window.next_token_logits(done.question)
    return done


def expected(done: Reused, tier: str) -> None:
    """Raises RuntimeError if the body is of another tier: then the row would be of something else."""
    if done.admissions[-1].tier != tier:
        raise RuntimeError(f"the body was to be served as {tier}: {done.admissions[-1]}")


def stored(reuser: Reuser, prompt: Any) -> Reused:
    """A miss, until its patch is stored."""
    done = first_token(reuser, prompt)
    done.window.flush()
    return done


def round_of(rig: Rig, form: Form, policy: ReusePolicy, name: str, clock: Clock) -> int:
    """Times a miss and a reuse in every tier that this form and policy have. Bytes of the body's objects."""
    header = rig.words(HEADER)
    prompt = rig.prompt(header)
    with tempfile.TemporaryDirectory() as folder:

        def opened() -> Reuser:
            return Reuser(rig.backbone, ChunkStore.open(folder, kv=form, digest="blake3"), policy, sink=SINK)

        first = opened()
        done = clock.timed(f"{name} miss", lambda: stored(first, prompt))
        if name == "as-is":
            expected(clock.timed("exact", lambda: first_token(first, prompt)), "exact")
        body = {one.chunk_id for one in done.admissions[1:]}
        size = sum(info.bytes for info in first.store.ls() if info.chunk_id in body)
        expected(clock.timed(f"{name} patched", lambda: first_token(opened(), prompt)), "patched")
    return size


def measure(body: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds, in which all ways take turns."""
    rig = Rig(body)
    cases: list[tuple[Form, ReusePolicy, str]] = [(form, POLICY, form) for form in FORMS]
    cases.append(("as-is", PROVED, "proved"))
    clock, sizes = Clock(), {}
    for number in range(rounds + 1):
        clock.timed("no cache", lambda: rig.nothing(rig.words(HEADER)))
        for form, policy, name in cases:
            sizes[name] = round_of(rig, form, policy, name, clock)
        if number == 0:
            clock.held.clear()  # warm-up
    base = clock.median("no cache")
    rows = [_row("live session", "exact", 0.0, base - clock.median("exact"), 0)]
    for name in clock.held:
        kept, _, tier = name.partition(" ")
        if tier == "patched":
            invested = clock.median(f"{kept} miss") - base
            rows.append(_row(kept, tier, invested, base - clock.median(name), sizes[kept]))
    seconds = {name: clock.median(name) for name in clock.held}
    return {"body": body, "rounds": rounds, "seconds": seconds, "rows": [vars(row) for row in rows]}


def _row(form: str, tier: str, invested: float, saved: float, size: int) -> Row:
    return Row(form, tier, invested, saved, invested / saved if saved > 0 else None, size)


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.breakeven")
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(asked.body, asked.rounds)
    for row in found["rows"]:
        repaid = "never" if row["f_star"] is None else f"{row['f_star']:.2f}"
        print(
            f"{row['form']:14} {row['tier']:12} invested {row['invested']:.3f} s  "
            f"saved {row['saved']:.3f} s  f* {repaid}  {row['bytes'] / 2**20:.2f} MiB"
        )
    if asked.output is not None:
        command = f"python -m lab.reuse.breakeven --body {asked.body} --rounds {asked.rounds}"
        document = {"command": command, "commit": commit(), "machine": machine(), **found}
        keep(document, asked.output)


if __name__ == "__main__":
    main()
