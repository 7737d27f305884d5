"""The probe forward: what no digest sees shows in what the model answers, and is refused by name."""

from __future__ import annotations

import logging

import pytest
import torch

from kamera import Backbone, ChunkStore
from kamera.errors import ComputationChanged
from tests.models import processors, samples, tiny
from tests.window.rig import inventory, make, watching

FAMILY = "qwen2_5_vl"
SECRET = b"a secret of 32 bytes, or nearly."


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch):
    """A function of the library that computes something else under the same name."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as library

    plain = library.Qwen2MLP.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) * 1.2

    forward.__module__, forward.__qualname__ = plain.__module__, plain.__qualname__
    return lambda: monkeypatch.setattr(library.Qwen2MLP, "forward", forward)


def opened(kind: str, folder):
    url = "memory://" if kind == "memory" else folder / "store"
    secret = {"secret": SECRET, "keys": [b"k" * 32]} if kind == "encrypted" else {}
    return ChunkStore.open(url, **secret)


@pytest.mark.parametrize("kind", ["memory", "directory", "encrypted"])
def test_a_store_refuses_a_model_that_answers_otherwise(kind, tmp_path, patched):
    chunk = samples.chunk(tiny.backbone(FAMILY), samples.sample(FAMILY))
    store = opened(kind, tmp_path)
    make(tiny.backbone(FAMILY), store, chunk)
    if kind != "memory":
        store.close()
        store = opened(kind, tmp_path)
    patched()
    other = Backbone(tiny.build(FAMILY))
    assert other.fingerprint == tiny.backbone(FAMILY).fingerprint
    held = inventory(store)
    with pytest.raises(ComputationChanged, match=r"answers the text probe otherwise.*another store"):
        make(other, store)
    assert inventory(store) == held
    make(other, ChunkStore.open("memory://"), chunk)


def test_a_suspicious_step_is_noticed_and_undoing_it_resumes(patched, monkeypatch):
    backbone = Backbone(tiny.build(FAMILY))
    chunks = [samples.chunk(backbone, samples.sample(FAMILY, seed)) for seed in (1, 2)]
    window = make(backbone, None, chunks[0])
    patched()
    # weights are loaded again, the same ones: the fingerprint is what it was
    backbone.model.load_state_dict(backbone.model.state_dict())
    with torch.no_grad():
        backbone.model.lm_head.weight.mul_(1.0)
    slots = window.slots
    with pytest.raises(ComputationChanged):
        window.append(chunks[1])
    assert window.slots == slots
    monkeypatch.undo()
    with torch.no_grad():
        backbone.model.lm_head.weight.mul_(1.0)
    assert window.append(chunks[1]).slot.guarantee == "exact"


def test_the_probe_is_asked_once_and_counts_for_nobody():
    backbone = Backbone(tiny.build(FAMILY))
    store = ChunkStore.open("memory://")
    with watching(backbone) as seen, backbone.measure() as work:
        make(backbone, store)
        first = seen.forwards
        make(backbone, store)
        make(backbone, ChunkStore.open("memory://")).fork()
    anchors = 2  # one a store
    assert first == 3  # the anchor, a text, and the question about it
    assert seen.forwards == first + anchors - 1
    assert (work.forwards, work.vision_encodes) == (anchors, 0)


def test_a_backbone_with_a_processor_is_shown_a_picture(tmp_path):
    backbone = Backbone(processors.matching_model(), processors.picture_processor())
    answers = backbone.answers()
    assert set(answers) == {"text", "picture"} and answers["text"] != answers["picture"]
    model = processors.matching_model()
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "patch" in n).mul_(-1)
    other = Backbone(model, processors.picture_processor()).answers()
    assert other["text"] == answers["text"] and other["picture"] != answers["picture"]


def test_another_machines_rounding_is_no_other_model(tmp_path):
    backbone = tiny.backbone(FAMILY)
    with ChunkStore.open(tmp_path / "s") as store:
        answers = {name: [x * (1 + 1e-4) for x in said] for name, said in backbone.answers().items()}
        store.probes.compare(backbone.fingerprint, lambda: answers, backbone.tolerance)
    with ChunkStore.open(tmp_path / "s") as store:
        make(backbone, store)
    with ChunkStore.open(tmp_path / "s") as store, pytest.raises(ComputationChanged, match="nan"):
        wrong = {name: [float("nan")] * len(said) for name, said in answers.items()}
        store.probes.compare(backbone.fingerprint, lambda: wrong, backbone.tolerance)


@pytest.mark.parametrize("damage", [b"", b"{}}", b'{"text": 5}', b'{"text": ["x"]}', b"\xff\xfe"])
def test_a_damaged_probe_is_taken_anew_and_said_so(tmp_path, damage, caplog):
    backbone = tiny.backbone(FAMILY)
    with ChunkStore.open(tmp_path / "s") as store:
        make(backbone, store)
    [path] = (tmp_path / "s" / "probes").iterdir()
    kept = path.read_bytes()
    path.write_bytes(damage)
    with ChunkStore.open(tmp_path / "s") as store, caplog.at_level(logging.WARNING, "kamera"):
        make(backbone, store)
    assert "taken anew" in caplog.text
    assert path.read_bytes() == kept


def test_a_probe_in_a_sealed_store_tells_nothing_of_the_backbone(tmp_path):
    backbone = tiny.backbone(FAMILY)
    with opened("encrypted", tmp_path) as store:
        make(backbone, store)
    [path] = tmp_path.rglob("probes/*")
    plain = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert all(backbone.fingerprint.encode() not in p.read_bytes() for p in plain)
    assert b"text" not in path.read_bytes() and backbone.fingerprint not in path.name
    assert path.stat().st_mode & 0o777 == 0o600
