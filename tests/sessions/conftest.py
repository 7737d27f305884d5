"""The shipped backbone and the pictures of an episode, for the tests of a file."""

from __future__ import annotations

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def frames() -> list:
    return [frame.image for frame in testbed.World(seed=3).episode(0, legends=4).frames]
