"""Policies keep what the agents' own code kept, request by request.

Each file of ``recorded`` holds one conversation that an agent's published code was run on: every request
without the agent's rule (``full``) and as the rule left it (``kept``), as indices into ``messages``. Pictures
are names, texts are ours or are numbered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kamera.edits import EditPolicy, policies

_FOLDER = Path(__file__).parent / "recorded"
_DOCS = Path(__file__).parents[2] / "docs" / "sessions.md"
NAMES = sorted(path.stem for path in _FOLDER.glob("*.json"))


def recording(name: str) -> dict[str, Any]:
    return json.loads((_FOLDER / f"{name}.json").read_text())


def requests(name: str) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """The recorded requests, each without and with the agent's rule."""
    held = recording(name)
    messages = held["messages"]
    bodies = [[[messages[i] for i in r[side]] for side in ("full", "kept")] for r in held["requests"]]
    return [(full, kept) for full, kept in json.loads(json.dumps(bodies))]  # no two messages share a dict


def rule(name: str) -> EditPolicy:
    function, args, options = recording(name)["rule"]
    return getattr(policies, function)(*args, **options)


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_keeps_what_the_agent_keeps_in_every_request(name):
    policy, recorded = rule(name), requests(name)
    different = [turn for turn, (full, kept) in enumerate(recorded) if policy(full, turn) != kept]
    assert len(recorded) >= 20
    assert different == []


@pytest.mark.parametrize("name", NAMES)
def test_the_document_names_the_policy_of_the_agent(name):
    function, args, options = recording(name)["rule"]
    given = [*map(json.dumps, args), *(f"{key}={json.dumps(value)}" for key, value in options.items())]
    assert f"| `{function}({', '.join(given)})` |" in _DOCS.read_text()
