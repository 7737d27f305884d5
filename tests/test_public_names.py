"""The names that a user imports from `kamera`: a snapshot, so that none comes or goes unseen."""

from __future__ import annotations

import kamera

NAMES = {
    *("Backbone", "ChatSession", "Chunk", "ChunkStore", "Clip", "Directive", "KameraError", "KameraWindow"),
    *("MediaLimits", "Patch", "Report", "ReusePolicy", "SessionPool", "Slot", "Turn"),
    *("errors", "policies", "read_video"),
}


def test_the_public_names_are_those_that_are_written_down():
    assert set(kamera.__all__) - {"__version__"} == NAMES
    assert all(getattr(kamera, name) is not None for name in NAMES)
