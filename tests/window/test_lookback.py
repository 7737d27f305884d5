"""Looking back by likeness, on real tiny models with real pictures and on the backbone that binds."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import UnknownChunk
from kamera.window import former_of
from tests.models import processors, samples, tiny
from tests.window.rig import Snapshot, inventory, make, pictures, watching

TOKENS_OF_PICTURES = (150, 151)  # in every tiny family


def features(backbone: HfEngine, chunk) -> torch.Tensor:
    """The reference: mean of the rows that the vision tower filled, from a run of the whole model's front."""
    encoded = backbone.encode(chunk)
    table = backbone.model.get_input_embeddings()
    rows = encoded.tensors["inputs_embeds"][0]
    placed = [i for i, token in enumerate(chunk.input_ids.tolist()) if token in TOKENS_OF_PICTURES]
    assert not torch.allclose(rows[placed], table(chunk.input_ids[placed]))  # no text embeddings among them
    mean = rows[placed].double().mean(0)
    return mean / mean.norm()


@pytest.mark.few(3)
@pytest.mark.parametrize("family", tiny.of_each_kind(samples.PICTURED))
def test_every_family_has_embeddings_of_its_picture_tokens(family):
    backbone = tiny.backbone(family)
    chunks = pictures(backbone, family, 3)
    window = make(backbone, None, *chunks)
    for chunk in chunks:
        held = former_of(window).store.embedding(former_of(window).context, chunk.id)
        assert held is not None and held == pytest.approx(features(backbone, chunk).numpy(), abs=1e-3)
    # the picture finds itself, from the store, without the vision tower
    with watching(backbone) as seen:
        best = window.search(chunks[1], k=3)[0]
    assert best.chunk_id == chunks[1].id and best.score > 0.999 and seen.encodes == seen.forwards == 0


# -- real pictures through a real processor --------------------------------------------------------


def painted(seed: int) -> Image.Image:
    """Blocks of colour."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((32, 32), Image.Resampling.NEAREST)


def recompressed(image: Image.Image, quality: int = 85) -> Image.Image:
    """The same picture as another file: no pixel need be what it was."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(processors.matching_model(), processors.picture_processor())


@pytest.fixture
def watched(backbone):
    """A window that saw five pictures, and of which the first three have left."""
    window = KameraWindow(
        backbone,
        ChunkStore.open("memory://"),
        "You watch.",
        policy=ReusePolicy(rank=64, patch_bytes=None, forms="always"),
    )
    seen = [window.append(painted(seed)).slot.chunk_id for seed in range(5)]
    window.slide(3)
    return window, seen


def test_recall_like_a_picture_equals_recall_by_id(watched):
    window, seen = watched
    window.fork().recall(seen[1])  # forms the patch that both take
    by_id, by_look = window.fork(), window.fork()
    expected = by_id.recall(seen[1])
    with watching(former_of(window).backbone) as work:
        report = by_look.recall(like=recompressed(painted(1)))
    assert report.slot.chunk_id == seen[1] == expected.slot.chunk_id
    # one look at the new picture; the rest is the recall's own
    assert report.vision_encodes == work.encodes == 1 and expected.vision_encodes == 0
    assert report.forwards == work.forwards == expected.forwards == 0
    assert seen[1] in report.notes[0] and "cosine" in report.notes[0]
    assert torch.equal(by_look.next_token_logits("What?"), by_id.next_token_logits("What?"))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (
            lambda w: w.recall(like=painted(77), min_score=0.9999),
            UnknownChunk,
            "cosine of .*min_score=0.9999",
        ),
        (lambda w: w.recall(), ValueError, "one of the two"),
        (lambda w: w.recall("ab", like=painted(1)), ValueError, "one of the two"),
        (lambda w: w.recall(like="the desk"), ValueError, "no picture"),
        (lambda w: w.search("the desk"), ValueError, "no picture"),
        (lambda w: w.search(painted(1), 0), ValueError, "k 0"),
    ],
)
def test_refusals_say_why_and_leave_the_window_as_it_was(watched, ask, error, message):
    window, _ = watched
    before, held = Snapshot.of(window), inventory(former_of(window).store)
    with pytest.raises(error, match=message):
        ask(window)
    assert before.matches(window) and inventory(former_of(window).store) == held


def test_a_patch_behind_a_similar_chunk_is_near_within_a_limit(backbone):
    store = ChunkStore.open("memory://")
    first = KameraWindow(
        backbone, store, "You watch.", policy=ReusePolicy(rank=64, patch_bytes=None, forms="always")
    )
    for picture in (painted(0), painted(1)):
        first.append(picture)
    for limit, served in ((0.7, "near"), (0.0, "exact"), (None, "exact")):
        policy = ReusePolicy(
            "near", "prefill", rank=64, patch_bytes=None, max_divergence=limit, forms="always"
        )
        window = KameraWindow(backbone, store, "You watch.", policy=policy)
        window.append(recompressed(painted(0)))  # no chunk in common with what the patch was formed behind
        report = window.append(painted(1))
        assert report.slot.guarantee == served and (report.forwards == 0) == (served == "near")
        assert any("divergence" in note for note in report.notes) == (served == "near")


# -- the backbone that binds -----------------------------------------------------------------------
