"""The table of docs/proofs.md is the one of the measured files."""

from __future__ import annotations

import json

from lab.proofs.page import RESULTS, page

DOCS = RESULTS.parents[1]


def test_the_documents_table_is_that_of_the_files():
    assert page() in (DOCS / "proofs.md").read_text(encoding="utf-8")


def test_nothing_proved_itself_that_questions_lost_by():
    beds = [json.loads(path.read_text(encoding="utf-8"))["families"] for path in RESULTS.glob("*.json")]
    arms = [(name, arm) for bed in beds for arms in bed.values() for name, arm in arms["arms"].items()]
    assert len(beds) >= 6 and not [name for name, arm in arms if arm["missed"]]
    wrong = {name for name, arm in arms if name.startswith("SABOTAGE") and arm["proved"]}
    assert wrong <= {"SABOTAGE axis w not rotated"}
