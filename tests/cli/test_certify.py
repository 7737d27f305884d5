"""``kamera certify`` writes what it found, and windows and doctor go by it."""

from __future__ import annotations

import pytest

from kamera import Certificate, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.certify.sabotage import SABOTAGES
from kamera.engines.hf import HfEngine
from kamera.errors import UncertifiedBackbone
from tests.cli.run import files, kamera
from tests.compile.saved import bare_model, vision_backbone, vision_model
from tests.window.certificates import but, certificate, none_safe


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The directory certificates go to and are looked for in."""
    monkeypatch.setenv("KAMERA_CERTIFICATES", str(tmp_path / "certificates"))
    return tmp_path / "certificates"


def looked_back(policy: ReusePolicy) -> tuple[int, str]:
    """Forwards of the second recall of the last frame, and its guarantee."""
    backbone = HfEngine(*testbed.load())
    frames = [backbone.chunk(frame.content) for frame in testbed.World(3).episode(0, layout="LI").frames]
    window = KameraWindow(backbone, ChunkStore.open("memory://"), testbed.SYSTEM, policy=policy)
    for frame in frames:
        window.append(frame)
    window.evict(1)
    report = window.recall(frames[1].id)
    return report.forwards, report.slot.guarantee


def test_a_safe_model_is_certified_and_windows_find_it(capsys, folder, monkeypatch):
    """The probe is asked at length elsewhere; here it has found what it would."""

    def found(backbone, *, probe, items, rank, patch_bytes, model, bar):
        asked.append((probe, items, rank, patch_bytes, model))
        return certificate(backbone, rank, findings=but("survivor", "unsafe", "it knows"), probe=probe)

    asked: list[tuple] = []
    monkeypatch.setattr("kamera.cli.certify.probed", found)
    policy = ReusePolicy(rank=16, certified=True, tolerance=None, forms="always")
    with pytest.warns(UncertifiedBackbone, match="--dtype float32 --rank 16"):
        assert looked_back(policy) == (1, "exact")
    options = (
        "--items",
        10,
        "--rank",
        16,
        "--dtype",
        "float32",
        "--format",
        "json",
    )
    done = kamera(capsys, "certify", "testbed", *options)
    assert done.code == 0, done.err
    assert asked == [("world", 10, 16, ReusePolicy.patch_bytes, "testbed")]
    document = done.document
    path = document.pop("path")
    assert list(files(folder)) == [folder / path.rpartition("/")[2]]
    held = Certificate.read(path)
    assert (held.safe, held.probe, held.grounds.budget.rank) == (("patched", "orbit", "near"), "world", 16)
    assert document["findings"]["survivor"]["reason"] == "it knows"
    assert document["sabotages"]["no rotation"]["verdict"] == "unsafe"
    with pytest.warns(UncertifiedBackbone, match="withholds survivor KV"):
        assert looked_back(policy) == (0, "patched")


@pytest.mark.slow
def test_the_shipped_backbone_serves_patches_and_samples(capsys):
    done = kamera(capsys, "certify", "testbed", "--dtype", "float32", "--format", "json")
    assert done.code == 0, done.err
    verdicts = {name: finding["verdict"] for name, finding in done.document["findings"].items()}
    unsafe = dict.fromkeys(("orbit", "survivor", "near"), "unsafe")
    assert verdicts == {"patched": "safe", "sampled": "safe", **unsafe}
    assert "safe" not in {finding["verdict"] for finding in done.document["sabotages"].values()}


def test_a_user_without_a_home_is_asked_for_a_folder(capsys, monkeypatch):
    for name in ("KAMERA_CERTIFICATES", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what Python does then
    done = kamera(capsys, "certify", vision_model(), "--items", 3)
    assert done.code == 2 and "give --output, or set KAMERA_CERTIFICATES" in done.err


@pytest.mark.slow
def test_a_model_too_weak_to_read_gets_cannot_tell_and_exit_code_1(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kamera.certify.trials.ANSWER_TOKENS", 1)
    for name in SABOTAGES.keys() - {"no rotation", "stale patch"}:
        monkeypatch.delitem(SABOTAGES, name)
    done = kamera(capsys, "certify", vision_model(), "--items", 1, "--output", tmp_path / "elsewhere")
    assert done.code == 1
    (path,) = files(tmp_path / "elsewhere")
    held = Certificate.read(path)
    assert (held.safe, held.probe, held.grounds.budget.rank) == ((), "pages", ReusePolicy.rank)
    assert {finding.verdict for finding in held.findings.values()} == {"cannot tell"}
    for shown in ("cannot tell", "re-prefill answers", "fingerprint", "pages, 1 questions a guarantee"):
        assert shown in done.out
    for row in ("patched", "sampled", "orbit", "survivor", "near", "no rotation", "stale patch"):
        assert f"\n{row}: " in done.out
    assert not folder.exists()


def test_a_model_without_pictures_is_refused_without_a_file(capsys, folder):
    done = kamera(capsys, "certify", bare_model("qwen2_5_vl"))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error:")
    assert not folder.exists()


@pytest.mark.parametrize("wrong", [("--rank", "0"), ("--items", "0"), ("--probe", "leaves")])
def test_bad_options_are_refused_before_anything_is_loaded(capsys, wrong):
    assert kamera(capsys, "certify", "no-such-model", *wrong).code == 2


def test_doctor_says_whether_a_certificate_serves(capsys, folder):
    assert "certificate        none that serves" in kamera(capsys, "doctor", vision_model()).out
    certificate(vision_backbone(), ReusePolicy.rank).write(folder)
    done = kamera(capsys, "doctor", vision_model(), "--format", "json")
    assert done.document["certificate"] == (
        "serves patched, orbit, survivor, near at rank 32 (probe 'by hand', 2026-01-01T00:00:00+00:00)"
    )
    found = but("survivor", "unsafe", "it knows")
    certificate(vision_backbone(), ReusePolicy.rank, findings=found).write(folder)
    done = kamera(capsys, "doctor", vision_model(), "--format", "json")
    shown = "serves patched, orbit, near at rank 32; withheld: survivor unsafe"
    assert shown in done.document["certificate"]
    certificate(vision_backbone(), ReusePolicy.rank, findings=none_safe("unsafe", "it lies")).write(folder)
    assert "it lies" in kamera(capsys, "doctor", vision_model()).out
