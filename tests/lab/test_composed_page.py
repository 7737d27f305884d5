"""The tables of docs/results/composed.md are those of the measured files."""

from __future__ import annotations

from pathlib import Path

from lab.composed.page import beds, lines, verdict
from lab.composed.windows import served

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "composed.md"


def test_the_document_shows_what_was_measured():
    shown = DOCUMENT.read_text(encoding="utf-8").splitlines()
    wanted = [line.rstrip("\n") for line in lines() if line]
    assert len(wanted) > 20 and [line for line in wanted if line not in shown] == []


def test_sabotaged_terms_lose_in_every_table():
    """Where order does not matter an orbit patch is as good, and the swapped arm passes, too."""
    for (_, world), counts in beds().items():
        for count in counts:
            for task, found in count["tasks"].items():
                arms = found["arms"]
                low = min(
                    arms[name]["low"] for name in (served(task, count["count"]), "triples") if name in arms
                )
                ordered = arms["orbit"]["high"] < low
                assert ordered or world != "override" or (count["count"], task) == (3, "oldest left")
                broken = [name for name in arms if name.startswith("SABOTAGE")]
                assert len(broken) == 3 + ("triples" in arms)
                seen = [name for name in broken if ordered or "swapped" not in name]
                assert max(arms[name]["high"] for name in seen) < low


def test_a_goal_is_met_by_the_whole_interval_or_said_not_to_be():
    arm = {"eta": 0.92, "low": 0.88, "high": 0.95}
    assert [verdict(arm, goal) for goal in (0.85, 0.9, 0.95)] == ["met", "met by the mean", "**missed**"]
