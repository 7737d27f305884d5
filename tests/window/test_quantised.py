"""Windows on a store of codes: what came out of codes says so, and a patch makes up for it."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.ops.quantize import KV_CODECS
from kamera.window import WINDOW, former_of
from tests.engines.compare import relative, worst
from tests.window.rig import (
    QUESTION,
    Prefilled,
    guarantees,
    is_a_reprefill,
    live,
    make,
    rig,
    same_bits,
    watching,
)

CODECS = pytest.mark.parametrize("codec", KV_CODECS)
FAMILIES = ("qwen2_5_vl", "kimi_k25")
EXACT = ReusePolicy(minimum="exact")


def opened(codec: str, place: object = "memory://") -> ChunkStore:
    return ChunkStore.open(place, kv=codec)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pieces():
    return rig("qwen2_5_vl")


@pytest.mark.few(3)
@CODECS
@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_kv_is_patched_at_best_and_a_patch_repairs_it(family, codec):
    """Both chunks are patched: the leading one as codes lost a little, the other as its patch says.

    At full rank that patch takes the *decoded* canonical to the KV the model computed in context, so
    nothing of what the codes lost is left in it.
    """
    backbone, chunks = rig(family)
    store = opened(codec)
    first = make(backbone, store, *chunks[:2])
    assert guarantees(first) == ["exact", "exact"] and is_a_reprefill(first, chunks)
    window = make(backbone, store)
    with watching(backbone) as seen:
        for chunk in chunks[:2]:
            window.recall(chunk.id)
    assert (seen.forwards, seen.encodes) == (0, 0)
    assert guarantees(window) == ["patched", "patched"]
    plain = Prefilled(backbone, chunks[:2])
    loss = store.get_canonical(former_of(window).context, chunks[0].id).loss.relative
    off = worst(live(window, 0), plain.kv(0))
    assert loss / 5 < off < 5 * loss
    assert worst(live(window, 1), plain.kv(1)) < 1e-4 < loss
    assert relative(window.next_token_logits(QUESTION), plain.logits) < 50 * loss


@CODECS
def test_under_exact_a_coded_canonical_misses_without_encoding(pieces, codec):
    backbone, chunks = pieces
    store = opened(codec)
    make(backbone, store, *chunks[:2])
    window = make(backbone, store, policy=EXACT)
    for i, chunk in enumerate(chunks[:2]):
        with watching(backbone) as seen:
            window.append(chunk) if i else window.recall(chunk.id)
        assert (seen.forwards, seen.tokens, seen.encodes) == (1, chunk.num_tokens, 0)
    assert guarantees(window) == ["exact", "exact"]
    assert is_a_reprefill(window, chunks)
    window.slide()
    assert guarantees(window) == ["exact"] and is_a_reprefill(window, chunks)


@CODECS
def test_a_saved_window_keeps_saying_that_it_came_out_of_codes(pieces, codec, tmp_path):
    backbone, chunks = pieces
    store = opened(codec)
    window = make(backbone, store, chunks[0])
    window.save(tmp_path / "exact")
    coded = make(backbone, store, chunks[0])
    coded.save(tmp_path / "coded")
    document = WINDOW.read(tmp_path / "coded").document
    assert ["coded" in c["copies"]["copy"]["kv"] for c in document["chunks"]] == [True]  # kept in codes
    loaded = KameraWindow.load(tmp_path / "coded", backbone, store)
    assert guarantees(loaded) == ["patched"]
    assert same_bits(live(loaded, 0), live(coded, 0))
    assert guarantees(KameraWindow.load(tmp_path / "exact", backbone, store)) == ["exact"]
    assert [seat["source"]["lossy"] for seat in document["seats"]["seats"]] == [True]
