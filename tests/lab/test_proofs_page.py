"""The table of docs/proofs.md is the one of the measured files."""

from __future__ import annotations

import json

from kamera.trust.proof import KV_BOUND
from lab.proofs.page import RESULTS, narrow, page

DOCS = RESULTS.parents[1]


def test_the_documents_table_is_that_of_the_files():
    text = (DOCS / "proofs.md").read_text(encoding="utf-8")
    assert page() in text
    assert narrow() in text


def test_nothing_proved_itself_that_questions_lost_by():
    beds = [json.loads(path.read_text(encoding="utf-8"))["families"] for path in RESULTS.glob("*.json")]
    arms = [(name, arm) for bed in beds for arms in bed.values() for name, arm in arms["arms"].items()]
    assert len(beds) >= 6
    assert not [name for name, arm in arms if arm["missed"] or arm["narrow, missed"]]


def test_no_wrong_build_proved_itself_by_its_kv():
    beds = [json.loads(path.read_text(encoding="utf-8"))["families"] for path in RESULTS.glob("*.json")]
    arms = [(name, arm) for bed in beds for arms in bed.values() for name, arm in arms["arms"].items()]
    wrong = [arm for name, arm in arms if name.startswith("SABOTAGE")]
    assert sum(arm["answered"] + arm["narrow, answered"] for arm in wrong) > 0, "answers alone hide some"
    assert not [arm for arm in wrong if arm["proved"] or arm["narrow"]]
    assert min(arm["kv, least"] for arm in wrong) > KV_BOUND
    assert max(arm["kv, largest"] for name, arm in arms if name == "formed") <= KV_BOUND
    assert min(arm["kv, least"] for name, arm in arms if name == "rank 1") > 1.0
