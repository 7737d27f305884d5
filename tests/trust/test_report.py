"""A report of `certify`: damage is refused by name, and a policy serves what was measured within a bound."""

from __future__ import annotations

import json

import pytest

from kamera import ReusePolicy
from kamera.errors import InvalidReport, StoreError
from kamera.trust import CertifyReport, Estimate, Losses


def row(guarantee: str, kl: float, departed: float | None = None) -> Losses:
    """A row whose interval ends at ``kl``."""
    loss = Estimate(kl / 2, 0.0, kl)
    return Losses(guarantee, departed, 9, 99, loss, None, loss, loss)


def report(**losses: float) -> CertifyReport:
    """A report with these ends of intervals; ``survivor_4`` is for a share of 0.4."""
    rows = []
    for name, kl in losses.items():
        guarantee, _, tenths = name.partition("_")
        rows.append(row(guarantee, kl, int(tenths) / 10 if tenths else None))
    return CertifyReport("tiny", "f" * 64, "float32", 16, 0.06, {"kamera": "1"}, "texts", "now", tuple(rows))


SOUND = report(patched=0.01, orbit=0.02, survivor_3=0.02, survivor_6=0.04, near_5=0.05, blind=0.3)


@pytest.mark.parametrize(
    ("max_kl", "expected"),
    [
        (0.005, ("exact", "exact", None, None)),
        (0.01, ("patched", "repair", None, None)),
        (0.02, ("orbit", "keep", 0.3, None)),
        (0.04, ("orbit", "keep", 0.6, None)),
        (0.1, ("near", "keep", 0.6, 0.5)),
        (0.3, ("blind", "keep", 0.6, 0.5)),
    ],
)
def test_a_policy_serves_the_weakest_that_is_within_the_bound(tmp_path, max_kl, expected):
    SOUND.write(tmp_path / "r.json")
    policy = ReusePolicy.from_report(tmp_path / "r.json", max_kl=max_kl)
    minimum, on_leave, departed, divergence = expected
    assert (policy.minimum, policy.on_leave, policy.max_divergence) == (minimum, on_leave, divergence)
    assert policy.max_departed == (ReusePolicy.max_departed if departed is None else departed)
    if minimum != "exact":
        assert (policy.rank, policy.patch_bytes) == (16, 0.06)
    else:
        assert policy.on_miss == "prefill"


def test_what_was_not_measured_or_lost_more_ends_the_choice():
    assert report(patched=0.01, orbit=0.5, blind=0.02).settings(0.1)["minimum"] == "patched"
    assert report(patched=0.01, blind=0.02).settings(0.1)["minimum"] == "patched"
    assert report(orbit=0.01, blind=0.02).settings(0.1)["minimum"] == "exact"
    skipped = report(patched=0.01, orbit=0.01, blind=0.02).settings(0.1)
    assert (skipped["minimum"], "max_divergence" in skipped) == ("blind", False)
    uneven = report(patched=0.01, survivor_3=0.5, survivor_6=0.01).settings(0.1)
    assert uneven["on_leave"] == "repair"


@pytest.mark.parametrize("max_kl", [0.0, -1.0, float("nan")])
def test_a_bound_must_be_positive(max_kl):
    with pytest.raises(ValueError, match="max_kl"):
        SOUND.settings(max_kl)


def test_what_is_written_is_read(tmp_path):
    SOUND.write(tmp_path / "r.json")
    assert CertifyReport.read(tmp_path / "r.json") == SOUND
    with pytest.raises(StoreError, match="cannot be written"):
        SOUND.write(tmp_path / "missing" / "r.json")


def edited(change) -> str:
    document = json.loads(text())
    change(document)
    return json.dumps(document)


def text() -> str:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        SOUND.write(Path(folder) / "r.json")
        return (Path(folder) / "r.json").read_text()


DAMAGED = {
    "empty": ("", "is no report"),
    "cut": (text()[:-40], "is no report"),
    "a list": ("[]", "is no report"),
    "a lower loss": (edited(lambda d: d["report"]["rows"][1]["kl"].update(high=0.0)), "was changed after"),
    "another model": (edited(lambda d: d["report"].update(fingerprint="0" * 64)), "was changed after"),
    "another format": (edited(lambda d: d.update(format=2)), "format 2, this version reads 1"),
    "no digest": (edited(lambda d: d.pop("sha256")), "is no report"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_report_is_refused_by_name(tmp_path, name):
    content, reason = DAMAGED[name]
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(InvalidReport, match=f"r.json'.*{reason}.*run kamera certify"):
        ReusePolicy.from_report(tmp_path / "r.json", max_kl=0.1)


def test_a_missing_report_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidReport, match=r"no report at .*r\.json"):
        ReusePolicy.from_report(tmp_path / "r.json", max_kl=0.1)
