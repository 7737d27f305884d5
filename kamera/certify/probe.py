"""Probes: scenes whose questions need two chunks at once, read through a chunk that is reused.

A single-hop question, or one logit, passes where multi-hop answers are halved (paper, section 1). So
every question here joins what the last chunk of a scene shows with what an earlier one does: the last
chunk's KV absorbed the earlier one, and that is what reuse without a patch loses.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PROBE_SEED = 400_000
"""Where a probe's scenes start; the shipped backbones were trained on seeds of a million and above."""

PER_SCENE = 6
"""Questions of a scene: half after a recall, half after a slide. Few, so that scenes vary."""


@dataclass(frozen=True)
class Query:
    """A question, its answer, and the words among which a guess would be right by chance."""

    text: str
    answer: str
    options: tuple[str, ...]

    def read(self, said: str) -> str:
        """The option an answer in words names first; "" when it names none."""
        found = {o: re.search(rf"\b{re.escape(o)}\b", said, re.IGNORECASE) for o in self.options}
        places = {o: match.start() for o, match in found.items() if match}
        return min(places, key=lambda o: places[o]) if places else ""


@dataclass(frozen=True, eq=False)
class ProbeScene:
    """Chunks in order, as chat content, and the questions.

    The first chunk bears on no question: it leaves before the second half of them, so that what a
    slide serves is asked too. The last chunk is the one that goes and comes back.
    """

    system: str
    contents: tuple[list[dict[str, Any]], ...]
    queries: tuple[Query, ...]

    def feed(self, digest: Any) -> None:
        """Feed everything that is shown and asked to a hash, pixels included."""
        for content in self.contents:
            for part in content:
                shown = part["image"].tobytes() if part["type"] == "image" else part["text"].encode()
                digest.update(len(shown).to_bytes(8, "little") + shown)
        digest.update(repr((self.system, self.queries)).encode())


def world_scenes() -> Iterator[ProbeScene]:
    """Frames of the synthetic world: the shipped backbones read no English pages.

    Legends and an items frame; asked are values that a legend other than the first fixes, whether
    the first is there or not.
    """
    from kamera import testbed

    world, index = testbed.World(PROBE_SEED), 0
    while True:
        episode = world.episode(index, layout="LLLI")
        rng = np.random.default_rng([PROBE_SEED, index])
        index += 1
        values = [episode.ask(*subject) for subject in episode.subjects(["value"])]
        options = tuple(sorted({question.answer for question in values}))
        asked = [
            Query(question.text, question.answer, options)
            for question in values
            if question.bound
            and 0 not in question.frames
            and episode.answer(question, order=range(1, len(episode.frames))) == question.answer
        ]
        chosen = [asked[i] for i in rng.permutation(len(asked))[:PER_SCENE]]
        yield ProbeScene(testbed.SYSTEM, tuple(f.content for f in episode.frames), tuple(chosen))


def page_scenes() -> Iterator[ProbeScene]:
    """Pages of English text and captioned shapes, for backbones that read."""
    from kamera.certify.pages import draw_scene

    index = 0
    while True:
        system, contents, queries = draw_scene(np.random.default_rng([PROBE_SEED, index]), index)
        yield ProbeScene(system, contents, tuple(queries[:PER_SCENE]))
        index += 1


PROBES: dict[str, Callable[[], Iterator[ProbeScene]]] = {"pages": page_scenes, "world": world_scenes}


def digest_of(name: str, scenes: Sequence[ProbeScene]) -> str:
    """BLAKE2b-256 over all that a probe shows and asks."""
    digest = hashlib.blake2b(name.encode(), digest_size=32, person=b"kamera-probe")
    for scene in scenes:
        scene.feed(digest)
    return digest.hexdigest()
