"""The probes by name, scene after scene."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kamera.certify import pages, world
from kamera.certify.probe import PROBE_SEED, ProbeScene

PROBES = {"pages": pages.draw_scene, "world": world.draw_scene}
"""Pages of English text and captioned shapes, for backbones that read; frames of the synthetic world, for the
shipped ones, which read none."""


def scenes_of(probe: str) -> Iterator[ProbeScene]:
    """All scenes of a probe, the same ones every time."""
    return (PROBES[probe](PROBE_SEED, index) for index in itertools.count())
