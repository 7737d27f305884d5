"""The figures of `tests.reliability.remote` on a small scale, and that they would show a fault."""

from __future__ import annotations

import pytest

from benchmarks.reliability import rig
from kamera.store.remote.uploads import Uploads
from tests.reliability import remote
from tests.servers.redis_server import BINARY, MISSING

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


def test_outages_serve_nothing_wrong_and_lose_no_acknowledged() -> None:
    found = remote.run(360, seed=1)
    assert (found["wrong"], found["lost"]) == (0, 0)
    cases = {name: figures for name, figures in found.items() if isinstance(figures, dict)}
    assert len(cases) == 6
    for name, figures in cases.items():
        assert figures["troubles"] and figures["puts"] and figures["served"], name
    assert cases["lying"]["refused"]


def test_a_wrong_version_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "version_of", lambda found: 10**6)
    assert remote.run(60, seed=1)["wrong"]


def test_a_lost_object_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_TROUBLE", 0.5)
    monkeypatch.setattr(Uploads, "add", lambda self, name: None)
    assert remote.run(120, seed=1)["lost"]
