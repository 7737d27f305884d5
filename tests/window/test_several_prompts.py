"""What windows of several system prompts share: encodings, anchors, and canonicals as a base for patches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines import Spent
from kamera.engines.hf import HfEngine
from kamera.store import StoreAdmin
from kamera.window import Append, former_of
from kamera.window.plan import Harvest, Place
from tests.models import tiny
from tests.store.builders import file_of, flip
from tests.window.rig import FULL_RANK, QUESTION, SYSTEM, rig, watching

FAMILY = "qwen2_5_vl"
PLANNER, GROUNDER = SYSTEM, torch.tensor([21, 22, 23, 24, 25, 26, 27])  # of another length
EXACT = ReusePolicy(minimum="exact")
PATCHED = ReusePolicy(rank=FULL_RANK, forms="always")


def window(backbone, store, system, *chunks, policy=EXACT) -> KameraWindow:
    """A window with ``chunks``, when nothing of them is still to be stored."""
    made = KameraWindow(backbone, store, system, policy=policy)
    for chunk in chunks:
        made.append(chunk)
    made.flush()
    return made


def logits(made: KameraWindow) -> torch.Tensor:
    return made.next_token_logits(QUESTION)


def unshared(backbone, system, *chunks, policy=EXACT) -> torch.Tensor:
    with ChunkStore.open("memory://") as store:
        return logits(window(backbone, store, system, *chunks, policy=policy))


def key_of(store: ChunkStore, kind: str) -> str:
    return store.ls(kind)[0].key


@pytest.fixture
def pieces():
    return rig(FAMILY)


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore.open(tmp_path / "s", memory_limit=0) as opened:
        yield opened


# -- encodings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_picture_is_encoded_once_for_all_prompts(family, store):
    backbone, chunks = rig(family)
    window(backbone, store, PLANNER, *chunks[:2])
    other = window(backbone, store, GROUNDER)
    for chunk in chunks[:2]:
        assert other.plan(Append(chunk)).cost.vision_encodes == 0
        with watching(backbone) as seen:
            assert other.append(chunk).vision_encodes == seen.encodes == 0
    assert torch.equal(logits(other), unshared(backbone, GROUNDER, *chunks[:2]))
    assert StoreAdmin(store).stats().encodings == 2


def _other_layers(backbone: HfEngine) -> None:
    with torch.no_grad():
        next(backbone.decoder.layers[0].parameters()).mul_(1.5)


def _other_tower(backbone: HfEngine) -> None:
    with torch.no_grad():
        next(backbone.model.model.visual.parameters()).mul_(1.5)


def _other_embeddings(backbone: HfEngine) -> None:
    with torch.no_grad():
        backbone.model.get_input_embeddings().weight.mul_(1.5)


def _other_dtype(backbone: HfEngine) -> None:
    backbone.model.model.visual.to(torch.float64).to(torch.float32).to(torch.bfloat16)


CHANGES = {
    "layers": (_other_layers, True),
    "tower": (_other_tower, False),
    "token embeddings": (_other_embeddings, False),
    "dtype of the tower": (_other_dtype, False),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("change, same", CHANGES.values(), ids=CHANGES)
def test_an_encoding_belongs_to_its_vision_part(change, same):
    backbone = HfEngine(tiny.build(FAMILY))
    whole, vision = backbone.fingerprint, backbone.vision_fingerprint
    change(backbone)
    backbone.refresh()
    assert backbone.fingerprint != whole
    assert (backbone.vision_fingerprint == vision) == same


# -- anchors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["as-is", "int4"])
def test_a_prompt_is_prefilled_once_a_store(kv, pieces, tmp_path):
    backbone, chunks = pieces
    with ChunkStore.open(tmp_path / "s", kv=kv, memory_limit=0) as store:
        first = window(backbone, store, PLANNER)
        with backbone.measure() as work:
            again = window(backbone, store, PLANNER)
        assert work.forwards == 0
        kvs = (former_of(made).anchor.kv for made in (first, again))
        assert all(torch.equal(a[n], b[n]) for a, b in zip(*kvs, strict=True) for n in a)
        assert [i.context.kv for i in store.ls("anchor")] == ["as-is"]
        again.append(chunks[0])
        assert torch.equal(logits(again), unshared(backbone, PLANNER, chunks[0]))


def test_a_damaged_anchor_is_prefilled_again(pieces, store):
    backbone, chunks = pieces
    window(backbone, store, PLANNER)
    flip(file_of(Path(store.url), key_of(store, "anchor")))
    with backbone.measure() as work:
        made = window(backbone, store, PLANNER)
    assert work.forwards == 1 and len(store.ls("anchor")) == 1
    made.append(chunks[0])
    assert torch.equal(logits(made), unshared(backbone, PLANNER, chunks[0]))


# -- bases -----------------------------------------------------------------------------------------


def test_planner_and_grounder_share_encoding_and_canonical(pieces, store):
    backbone, chunks = pieces
    window(backbone, store, PLANNER, *chunks[:2], policy=PATCHED)
    size = StoreAdmin(store).stats().bytes
    first = window(backbone, store, GROUNDER, policy=PATCHED)
    for i, chunk in enumerate(chunks[:2]):
        plan = first.plan(Append(chunk))
        assert [s.base[:8] for s in plan.steps if isinstance(s, Harvest)] == [tensor_anchor(store)]
        report = first.append(chunk)
        assert (report.forwards, report.vision_encodes, report.slot.guarantee) == (1, 0, "exact"), i
        assert plan.cost == Spent(1, chunk.num_tokens, 0)
    later = window(backbone, store, GROUNDER, policy=PATCHED)
    for chunk in chunks[:2]:
        plan = later.plan(Append(chunk))
        placed = [s.seat.source.patch for s in plan.steps if isinstance(s, Place)]
        assert [patch.base[:8] for patch in placed] == [tensor_anchor(store)]
        report = later.append(chunk)
        assert (report.forwards, report.vision_encodes, report.slot.guarantee) == (0, 0, "patched")
        assert "base" in report.notes[0]
        assert plan.cost == Spent(0, 0, 0)
    stats = StoreAdmin(store).stats()
    assert (stats.canonicals, stats.encodings, stats.anchors) == (2, 2, 2)
    assert stats.bytes > size
    assert torch.allclose(logits(later), unshared(backbone, GROUNDER, *chunks[:2]), atol=1e-4, rtol=1e-4)


def tensor_anchor(store: ChunkStore) -> str:
    return store.ls("canonical")[0].context.anchor[:8]


@pytest.mark.parametrize("other", ["tenant", "form"])
def test_no_base_of_another_tenant_or_form(other, pieces, tmp_path):
    backbone, chunks = pieces
    with ChunkStore.open(tmp_path / "s") as mine:
        window(backbone, mine, PLANNER, chunks[0], policy=PATCHED)
    options = {"tenant": "acme"} if other == "tenant" else {"kv": "int8"}
    with ChunkStore.open(tmp_path / "s", **options) as theirs:
        made = window(backbone, theirs, GROUNDER, policy=PATCHED)
        assert not [s for s in made.plan(Append(chunks[0])).steps if isinstance(s, Harvest) and s.base]
        report = made.append(chunks[0])
        assert report.slot.guarantee == "exact" and report.vision_encodes == (other == "tenant")
