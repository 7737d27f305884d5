"""Attacks that the code is not up to yet: their tests are skipped by name, and this list gets shorter."""

from __future__ import annotations

import pytest

AWAITED = frozenset({"forks", "races", "full_disk", "foreign", "saves", "bombs"})
"""Attacks that have findings today. Whoever mends what they find takes the name out."""


@pytest.fixture(autouse=True)
def _awaited(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("attack")
    if marker is not None and marker.args[0] in AWAITED:
        pytest.skip(f"{marker.args[0]} has findings: see AWAITED in tests/reliability/conftest.py")
