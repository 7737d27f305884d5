"""What doctor proves, and how it refuses."""

from __future__ import annotations

from tests.cli.run import kamera
from tests.compile.saved import bare_model, vision_backbone, vision_model
from tests.models import tiny

UNIFORM, TIME, AXES = (1000, 1000, 1000), (1000, 0, 0), (500, 7, -11)


def test_a_supported_model_is_described_and_every_proof_shown(capsys):
    done = kamera(capsys, "doctor", vision_model(), "--system", "You watch.", "--format", "json")
    document = done.document
    assert (done.code, document["supported"], document["reason"]) == (0, True, None)
    relocations = [p for p in document["proofs"] if p["claim"].startswith("relocation")]
    assert [tuple(p["offset"]) for p in relocations] == [UNIFORM, TIME, AXES]
    assert document["proofs"][0]["claim"] == "a forward in pieces"
    assert [p["claim"] for p in document["proofs"]][4:] == [
        "full-rank patch, moved on",
        "moves in the live cache",
    ]
    assert [p["tolerance"] for p in document["proofs"]] == [1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-5]
    assert all(p["error"] <= p["tolerance"] and p["holds"] for p in document["proofs"])
    assert document["backbone"]["fingerprint"] == vision_backbone().fingerprint
    assert document["processor"]["class"] == type(vision_backbone().processor).__name__
    assert document["modalities"] == ["text", "image", "video as images"]
    prefix = vision_backbone().builder.seams("You watch.").prefix
    assert document["anchor_tokens"] == len(vision_backbone().builder.tokenize(prefix))
    assert document["notes"] == []


def test_a_hybrid_is_refused_with_the_reason(capsys):
    done = kamera(capsys, "doctor", bare_model("qwen3_5"), "--format", "json")
    assert done.code == 1
    assert done.document["supported"] is False
    assert "hybrid" in done.document["reason"]
    assert "running state" in done.document["reason"]
    table = kamera(capsys, "doctor", bare_model("qwen3_5"))
    assert table.code == 1
    assert "refused" in table.out
    assert "hybrid" in table.out


def test_no_model_is_refused_with_its_name(capsys, tmp_path):
    done = kamera(capsys, "doctor", tmp_path / "nothing", "--format", "json")
    assert done.code == 1
    assert str(tmp_path / "nothing") in done.document["reason"]


def test_a_position_limit_is_told_and_not_crossed(capsys):
    done = kamera(capsys, "doctor", bare_model("dynamic_ntk"), "--format", "json")
    document = done.document
    limit = document["backbone"]["position_limit"]
    assert done.code == 0
    assert limit == tiny.backbone("dynamic_ntk").limits.below
    assert any(str(limit) in note and "dynamic NTK" in note for note in document["notes"])
    assert max(document["proofs"][0]["offset"]) < limit
    assert document["processor"] is None
    assert document["anchor_tokens"] is None
