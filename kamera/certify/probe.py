"""Probes: scenes whose questions need two chunks at once, and the windows they are asked in.

A single-hop question, or one logit, passes where multi-hop answers are halved (paper, section 1). So
questions join a fact shown by the last chunk of a scene with one stated by an earlier chunk: the last chunk's
KV is conditioned on the earlier one, and reuse without a patch loses that. If two chunks contradict each
other the later one counts, so that an operator that loses positions, or order, is seen. Questions after a
chunk has left are about facts that stay and about facts that its departure changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kamera.ops import digest
from kamera.trust import Guarantee

Drawn = TypeVar("Drawn")

PROBE_SEED = 400_000
"""First seed of a probe's scenes; the shipped backbones were trained on seeds from a million on."""

PER_TRIAL = 12
"""Questions of a scene about one guarantee, at most. Few, so that scenes vary."""

Order = tuple[int, ...]
"""Numbers of a scene's chunks, in their order in a window."""

READER = 3
"""The chunk that refers to the others' facts. It comes last, and its KV has the guarantee under test."""

TRIALS: dict[Guarantee, tuple[Order, Order]] = {
    "patched": ((0, 1, 2, READER), (0, 1, 2, READER)),
    "sampled": ((0, 1, 2, READER), (2, 0, 1, READER)),
    "orbit": ((0, 1, 2, READER), (2, 0, 1, READER)),
    "survivor": ((0, 1, 2, READER), (1, 2, READER)),
    "near": ((4, 1, 2, READER), (0, 1, 2, READER)),
}
"""Windows of each guarantee: the one its KV was conditioned in, and the one it is served in."""

ORDERS = tuple(dict.fromkeys(order for orders in TRIALS.values() for order in orders))
"""Every order of chunks among them."""


@dataclass(frozen=True)
class Query:
    """A question, its answer, and the options of a guess."""

    text: str
    answer: str
    options: tuple[str, ...]

    def read(self, reply: str) -> str:
        """The option that the reply names first; "" if it names none."""
        found = {o: re.search(rf"\b{re.escape(o)}\b", reply, re.IGNORECASE) for o in self.options}
        places = {o: match.start() for o, match in found.items() if match}
        return min(places, key=places.__getitem__) if places else ""


@dataclass(frozen=True, eq=False)
class ProbeScene:
    """Five chunks as chat content (four state something, number `READER` refers to it), and the questions
    about each guarantee, answered for the window it is served in."""

    system: str
    contents: tuple[list[dict[str, Any]], ...]
    queries: Mapping[Guarantee, tuple[Query, ...]]


class ReaderFact(NamedTuple):
    """The answer to a question about the reader's facts; ``told`` if a chunk in the window states it."""

    answer: str
    told: bool


def draw(rng: np.random.Generator, items: Sequence[Drawn], count: int | None = None) -> list[Drawn]:
    """``count`` of the items in random order, all by default."""
    return [items[i] for i in rng.permutation(len(items))[:count]]


def draw_queries(
    rng: np.random.Generator,
    readings: Mapping[Order, Mapping[str, ReaderFact]],
    contested: Mapping[str, str],
    options: tuple[str, ...],
) -> dict[Guarantee, tuple[Query, ...]]:
    """The questions of a scene: for half the answer differs between the two windows of a trial, for half not.

    ``readings`` are every question about the reader's facts behind chunks in each of `ORDERS`. ``contested``
    are questions on which two chunks disagree: for patched KV these are the first half. ``options`` are all
    possible answers.
    """
    queries: dict[Guarantee, tuple[Query, ...]] = {}
    for guarantee, (before, after) in TRIALS.items():
        was, now = readings[before], readings[after]
        changed = {text: found.answer for text, found in now.items() if found.answer != was[text].answer}
        same = {text: now[text].answer for text in now if text not in changed and now[text].told}
        hard = dict(contested) if guarantee == "patched" else changed
        pairs = zip(*(draw(rng, [*group], PER_TRIAL // 2) for group in (hard, same)), strict=False)
        answers = hard | same
        queries[guarantee] = tuple(Query(text, answers[text], options) for pair in pairs for text in pair)
    return queries


def digest_of(name: str, scenes: Sequence[ProbeScene]) -> str:
    """A digest of all content and questions of a probe, pixels included."""
    fields: list[bytes | str] = []
    for scene in scenes:
        parts = chain.from_iterable(scene.contents)
        fields += [part["image"].tobytes() if part["type"] == "image" else part["text"] for part in parts]
        fields.append(repr((scene.system, sorted(scene.queries.items()))))
    return digest("kamera.probe.v1", name, *fields)
