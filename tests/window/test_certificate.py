"""Less than exact KV is served under a certificate that matches, and under nothing else."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from platformdirs.macos import MacOS
from platformdirs.unix import Unix
from platformdirs.windows import Windows

from kamera import Certificate, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import CertificateMismatch, InvalidCertificate, UncertifiedBackbone
from kamera.ops import PatchBudget
from kamera.store import StoreAdmin
from kamera.trust import Grounds, certified_by_default
from kamera.window import library_versions, terms_in_force
from kamera.window.certified import certificate_home, find_certificate, folders
from tests.models import samples, tiny
from tests.window.certificates import certificate, none_safe, reseal
from tests.window.rig import QUESTION, Snapshot, guarantees, is_a_reprefill, make, rig, watching

FAMILY = "qwen2_5_vl"
RANK = 5
CERTIFIED = ReusePolicy(rank=RANK, certified=True, tolerance=None, forms="always")
GROUNDS = Grounds("f" * 64, "float32", "", None, PatchBudget(32), library_versions())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The only directory certificates are looked for in."""
    monkeypatch.setenv("KAMERA_CERTIFICATES", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def pieces():
    return rig(FAMILY)


def fallback(backbone: HfEngine, match: str, **options) -> KameraWindow:
    """A window that says, in the words of ``match``, that it serves exact KV only."""
    with pytest.warns(UncertifiedBackbone, match=match):
        window = make(backbone, policy=CERTIFIED, **options)
    assert terms_in_force(window).certificate is None
    assert terms_in_force(window).served.minimum == "exact"
    return window


# -- without one -----------------------------------------------------------------------------------


def test_without_a_certificate_answers_equal_a_plain_prefill(pieces):
    backbone, chunks = pieces
    a, b, c, d = chunks
    window = fallback(backbone, "kamera certify .* --rank 5")
    for chunk in (a, b, c, d):
        window.append(chunk)
    assert is_a_reprefill(window, chunks)
    for step in (
        lambda: window.slide(),
        lambda: window.recall(a.id),
        lambda: window.reorder([2, 0, 3, 1]),
        lambda: window.evict(1),
        lambda: window.slide(),
    ):
        report = step()
        assert (report.forwards > 0, report.vision_encodes) == (True, 0)
        assert is_a_reprefill(window, chunks)
        assert set(guarantees(window)) == {"exact"}


def test_it_is_said_once_however_many_windows_there_are(pieces):
    backbone, (a, b, *_) = pieces
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            window = make(backbone, None, a, b, policy=CERTIFIED)
            window.recall(a.id)
            window.slide()
    ours = [w for w in told if issubclass(w.category, UncertifiedBackbone)]
    assert len(ours) == 1
    assert ours[0].filename.endswith("rig.py"), "it points at who opened the window"
    assert type(backbone.model).__name__ in str(ours[0].message)


def test_policies_that_need_none_look_for_none(pieces):
    backbone, (a, b, *_) = pieces
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncertifiedBackbone)
        exact = make(backbone, None, a, b, policy=ReusePolicy(minimum="exact", certified=True))
        free = make(backbone, None, a, b, policy=ReusePolicy(rank=RANK, certified=False, forms="always"))
    free.slide()
    assert (guarantees(exact), guarantees(free)) == (["exact", "exact"], ["survivor"])


def test_what_is_asked_for_by_name_is_done_without_a_certificate(pieces):
    backbone, (a, b, *_) = pieces
    window = fallback(backbone, "no certificate")
    window.append(a)
    window.append(b)
    report = window.condition(1, False)
    assert (report.forwards, guarantees(window)) == (0, ["exact", "blind"])
    window.condition(1, True)
    assert is_a_reprefill(window, [a, b])


def test_what_is_load_bearing_is_not_settled_by_uncertified_kv(pieces):
    backbone, (a, b, c, _) = pieces
    store = ChunkStore.open("memory://")
    make(
        backbone, store, b, c, policy=ReusePolicy(rank=RANK, certified=False, forms="always")
    )  # the patch of c behind b

    def prefills(window: KameraWindow) -> bool:
        for chunk in (a, b, c):
            window.append(chunk)
        with watching(backbone) as seen:
            window.is_load_bearing(0, QUESTION, max_new_tokens=1)
        return c.num_tokens in seen.spans

    held = certificate(backbone, RANK)
    assert not prefills(make(backbone, store, policy=CERTIFIED, certificate=held))
    assert prefills(fallback(backbone, "no certificate", store=store))


# -- with one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["found", "value", "file"])
def test_under_a_certificate_edits_run_no_forward(pieces, folder, given):
    backbone, (a, b, c, _) = pieces
    held = certificate(backbone, RANK)
    path = held.write(folder if given == "found" else folder / "elsewhere")
    options = {} if given == "found" else {"certificate": held if given == "value" else path}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncertifiedBackbone)
        window = make(backbone, None, a, b, c, policy=CERTIFIED, **options)
    assert terms_in_force(window).certificate == held
    assert terms_in_force(window.fork()).certificate == held
    window.reorder([0, 2, 1])  # its patches are formed once
    window.reorder([0, 2, 1])
    with watching(backbone) as seen:
        window.evict(2)
        window.recall(c.id)
        window.reorder([0, 2, 1])
        window.slide()
    assert (seen.forwards, seen.encodes) == (0, 0)
    assert set(guarantees(window)) == {"survivor"}


def test_a_certificate_beside_the_store_is_found(pieces, tmp_path):
    backbone, (a, b, *_) = pieces
    with ChunkStore.open(tmp_path / "store"):
        pass
    held = certificate(backbone, RANK)
    held.write(tmp_path / "store" / "certificates")
    with ChunkStore.open(tmp_path / "store") as store:
        assert terms_in_force(make(backbone, store, a, b, policy=CERTIFIED)).certificate == held
        assert StoreAdmin(store).verify().quarantined == ()


def test_a_probe_that_found_harm_outweighs_one_that_did_not(pieces, folder):
    backbone, _ = pieces
    certificate(backbone, RANK).write(folder)
    other = certificate(backbone, RANK, probe="pages", findings=none_safe("cannot tell", "too weak"))
    other.write(folder)
    assert terms_in_force(make(backbone, policy=CERTIFIED)).certificate is not None
    certificate(backbone, RANK, probe="pages", findings=none_safe("unsafe", "it lies")).write(folder)
    fallback(backbone, 'its verdict on "patched" is "unsafe": it lies')


# -- refused ---------------------------------------------------------------------------------------

REFUSED = {
    "rank": ({"budget": PatchBudget(6, 0.03)}, "patches of rank 6, the policy's rank is 5"),
    "bytes": ({"budget": PatchBudget(RANK, 0.02)}, "with patch_bytes 0.02, the policy's is 0.03"),
    "any bytes": ({"budget": PatchBudget(RANK)}, "with patch_bytes None, the policy's is 0.03"),
    "layers": (
        {"budget": PatchBudget(RANK, ReusePolicy.patch_bytes, (0, 2))},
        "with patches of layers 0, 2, the policy corrects all layers",
    ),
    "torch": ({"versions": {**library_versions(), "torch": "1.0"}}, "with torch 1.0, this is torch 2"),
    "kamera": ({"versions": {**library_versions(), "kamera": "0.0"}}, "with kamera 0.0, this is kamera"),
    "library": ({"versions": {}}, "with kamera None, this is kamera"),
    "dtype": ({"dtype": "bfloat16"}, "measured in bfloat16, this model is in float32"),
    "vocabulary": ({"vocabulary": "e" * 64}, "with vocabulary eeeeeeeeeeee, this tokenizer's is none"),
    "limit": ({"position_limit": 77}, "with positions up to 77, this model's end at"),
    "unsafe": ({"findings": none_safe("unsafe", "it lies")}, 'on "patched" is "unsafe": it lies'),
    "cannot tell": ({"findings": none_safe("cannot tell", "too weak")}, '"cannot tell": too weak'),
    "nothing asked": ({"findings": {}}, 'its probe did not ask about "patched"'),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_different_certificate_permits_nothing_and_says_why(pieces, folder, what):
    backbone, _ = pieces
    changes, line = REFUSED[what]
    held = certificate(backbone, RANK)
    if "findings" in changes:
        held = replace(held, **changes)
    else:
        held = replace(held, grounds=replace(held.grounds, **changes))
    with pytest.raises(CertificateMismatch, match=line) as refusal:
        make(backbone, policy=CERTIFIED, certificate=held)
    assert "\n" not in str(refusal.value)
    held.write(folder)
    fallback(backbone, line)


def test_one_changed_weight_refuses_the_certificate(folder):
    backbone = HfEngine(tiny.build(FAMILY))
    chunk = samples.chunk(backbone, samples.sample(FAMILY))
    held = certificate(backbone, RANK)
    held.write(folder)
    assert terms_in_force(make(backbone, None, chunk, policy=CERTIFIED)).certificate == held
    with torch.no_grad():
        next(backbone.model.parameters()).view(-1)[7] += 1e-3
    backbone.refresh()
    with pytest.raises(
        CertificateMismatch, match=f"on backbone {held.grounds.fingerprint[:12]}, this one has other weights"
    ):
        make(backbone, policy=CERTIFIED, certificate=held)
    fallback(backbone, "none of fingerprint")


def test_edited_and_forged_certificates_are_refused(pieces, folder):
    backbone, _ = pieces
    path = certificate(backbone, RANK, findings=none_safe("unsafe", "it lies")).write(folder)
    assert Certificate.read(path).findings == none_safe("unsafe", "it lies")
    path.write_text(path.read_text().replace('"verdict": "unsafe"', '"verdict": "safe"'))
    with pytest.raises(InvalidCertificate, match="changed after it was written"):
        make(backbone, policy=CERTIFIED, certificate=path)
    fallback(backbone, f"{path.name}.*changed after it was written")
    grounds = json.loads(path.read_text())["certificate"]["grounds"]
    reseal(path, grounds={**grounds, "versions": {**library_versions(), "transformers": "4.0"}})
    with pytest.raises(CertificateMismatch, match=r"with transformers 4\.0"):
        make(backbone, policy=CERTIFIED, certificate=path)


def test_what_is_no_certificate_is_refused_by_name(pieces, folder):
    path = certificate(pieces[0], RANK).write(folder)
    document = json.loads(path.read_text())
    for text, match in (
        ("", "is no certificate"),
        ("[1]", "is no certificate"),
        ("{}", "is no certificate"),
        (json.dumps({**document, "format": 99}), "certificate format 99"),
        (json.dumps({**document, "format": 1}), "certificate format 1, this version reads 2"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidCertificate, match=match):
            Certificate.read(path)
    path.write_text(json.dumps(document))
    reseal(path, extra=1)
    with pytest.raises(InvalidCertificate, match=r"extra fields found \(extra\)"):
        Certificate.read(path)
    path.write_text(json.dumps(document))
    fine = {**document["certificate"]["findings"]["patched"], "verdict": "fine"}
    reseal(path, findings={"patched": fine})
    with pytest.raises(InvalidCertificate, match=r"fine not in literal.*\['patched'\]\.verdict"):
        Certificate.read(path)
    reseal(path, findings={"perfect": document["certificate"]["findings"]["patched"]})
    with pytest.raises(InvalidCertificate, match=r"perfect not in literal.*findings\['perfect'\]"):
        Certificate.read(path)
    path.write_text(json.dumps(document))
    grounds = document["certificate"]["grounds"]
    for field, wrong, kind in (
        ("position_limit", "12", "int"),
        ("position_limit", True, "int"),
        ("dtype", 16, "str"),
        ("budget", {**grounds["budget"], "share": "0.03"}, "float"),
    ):
        reseal(path, grounds={**grounds, field: wrong})
        with pytest.raises(InvalidCertificate, match=rf"expected {kind}.*grounds\.{field}"):
            Certificate.read(path)
    with pytest.raises(InvalidCertificate, match="no certificate at"):
        Certificate.read(folder / "missing.json")


# -- saved windows ---------------------------------------------------------------------------------


def test_a_saved_window_loads_exact_without_its_certificate(pieces, folder):
    backbone, (a, b, c, _) = pieces
    path = certificate(backbone, RANK).write(folder)
    store = ChunkStore.open("memory://")
    window = make(backbone, store, a, b, c, policy=CERTIFIED)
    window.slide()
    saved = Snapshot.of(window)
    window.save(folder / "window")
    again = KameraWindow.load(folder / "window", backbone, store)
    assert terms_in_force(again).certificate is not None
    assert saved.matches(again, numbers=False)
    path.unlink()
    with pytest.warns(UncertifiedBackbone):
        lacking = KameraWindow.load(folder / "window", backbone, store)
    assert guarantees(lacking) == ["exact", "exact"]
    assert is_a_reprefill(lacking, [b, c])
    lacking.save(folder / "window")  # what was asked is kept: a later certificate serves it again
    held = certificate(backbone, RANK)
    assert (
        terms_in_force(KameraWindow.load(folder / "window", backbone, store, certificate=held)).served
        == CERTIFIED
    )


# -- the default -----------------------------------------------------------------------------------


def test_a_policy_asks_for_a_certificate_unless_it_is_told(monkeypatch):
    monkeypatch.delenv("KAMERA_CERTIFIED", raising=False)
    assert ReusePolicy().certified is True  # here, under pytest, as in production
    monkeypatch.setenv("KAMERA_CERTIFIED", "0")
    assert ReusePolicy().certified is False
    monkeypatch.setenv("KAMERA_CERTIFIED", "1")
    assert ReusePolicy().certified is True
    monkeypatch.setenv("KAMERA_CERTIFIED", "maybe")
    with pytest.raises(ValueError, match="'maybe' is neither"):
        certified_by_default()


@pytest.mark.parametrize(
    "system, said, place",
    [
        (Unix, "/somewhere", "/somewhere/kamera/certificates"),
        (Unix, "", "/home/me/.local/share/kamera/certificates"),
        (MacOS, "", "/home/me/Library/Application Support/kamera/certificates"),
        (Windows, "", "/local/kamera/certificates"),
    ],
)
def test_certificates_are_kept_in_the_users_directory(monkeypatch, system, said, place):
    monkeypatch.setattr("platformdirs.PlatformDirs", system)
    monkeypatch.setattr("platformdirs.windows.get_win_folder", {"CSIDL_LOCAL_APPDATA": "/local"}.__getitem__)
    monkeypatch.delenv("KAMERA_CERTIFICATES")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_DATA_HOME", said)
    assert certificate_home().as_posix() == place
    monkeypatch.setenv("KAMERA_CERTIFICATES", "/mine")
    assert certificate_home().as_posix() == "/mine"


def test_a_user_without_a_home_has_no_certificates_and_no_error(monkeypatch):
    for name in ("KAMERA_CERTIFICATES", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what Python does then
    assert certificate_home() is None and folders() == ()
    assert "set KAMERA_CERTIFICATES" in find_certificate(GROUNDS, folders()).refusal
