"""``kamera certify`` prints what was measured, and writes a report."""

from __future__ import annotations

import pytest

from kamera import ReusePolicy
from kamera.certify import CertifyReport, material
from tests.cli.run import kamera
from tests.compile.saved import bare_model, pictures, vision_model


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(material, "ASKED", 2)
    return tmp_path


def test_the_shipped_backbone_is_measured_on_its_world(capsys, here):
    asked = ("--documents", 1, "--guarantee", "patched", "--guarantee", "orbit", "--rank", 16)
    done = kamera(capsys, "certify", "testbed", *asked, "--format", "json")
    assert done.code == 0, done.err
    document = done.document
    assert (
        document["path"] == "certify-testbed.json" and document["material"] == "scenes of the shipped world"
    )
    assert [row["guarantee"] for row in document["rows"]] == ["patched", "orbit", "blind"]
    held = CertifyReport.read(here / "certify-testbed.json")
    assert (held.rank, held.model, held.rows[0].kl.mean) == (16, "testbed", document["rows"][0]["kl"]["mean"])
    policy = ReusePolicy.from_report(here / "certify-testbed.json", max_kl=held.rows[0].kl.high)
    assert (policy.minimum, policy.rank) == ("patched", 16)


def test_own_pictures_make_a_table(capsys, here):
    files = pictures(here, 3)
    options = ("--question", "Which?", "--documents", 1, "--guarantee", "survivor", "--report", "mine.json")
    done = kamera(capsys, "certify", vision_model(), *files, *options)
    assert done.code == 0, done.err
    for shown in ("3 of the user's own files", "departed", "KL (nats)", "survivor", "blind", "mine.json"):
        assert shown in done.out
    assert CertifyReport.read(here / "mine.json").of("survivor")[0].departed > 0


@pytest.mark.parametrize(
    "wrong", [("--rank", "0"), ("--documents", "0"), ("--guarantee", "sure"), ("--report", "no/where.json")]
)
def test_bad_options_are_refused_before_anything_is_loaded(capsys, wrong):
    assert kamera(capsys, "certify", "no-such-model", *wrong).code == 2


def test_a_model_without_a_processor_is_refused_without_a_file(capsys, here):
    done = kamera(capsys, "certify", bare_model("qwen2_5_vl"))
    assert (done.code, done.out) == (1, "") and done.err.startswith("error:")
    assert not [*here.iterdir()]
