"""What a window may serve: the least guarantee, what a miss does, and whose patch may stand in."""

from __future__ import annotations

import itertools

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.ops import apply_patch, form_patch, uniform_offset
from kamera.store import StoreAdmin
from kamera.trust import weakest
from kamera.window import former_of, keep_orbit
from tests.engines.compare import worst
from tests.window.rig import (
    FULL_RANK,
    Prefilled,
    Snapshot,
    distance,
    guarantees,
    live,
    make,
    rig,
    rope_index,
    watching,
)

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def pieces():
    return rig(FAMILY)


def archived(backbone, *chunks) -> ChunkStore:
    """A store that holds the chunks' canonicals and no patch."""
    store = ChunkStore.open("memory://")
    for chunk in chunks:
        make(backbone, store, chunk)
    assert not [i for i in store.ls() if i.rank is not None]
    return store


# -- minimum and on_miss ---------------------------------------------------------------------------

MATRIX = [
    (minimum, on_miss)
    for minimum, on_miss in itertools.product(
        ("exact", "patched", "orbit", "near", "blind"), ("form", "prefill", "blind")
    )
    if (minimum, on_miss) != ("exact", "blind")
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("minimum", "on_miss"), MATRIX)
def test_minimum_and_on_miss_decide_what_a_recall_does(pieces, minimum, on_miss):
    backbone, (a, b, *_) = pieces
    policy = ReusePolicy(
        minimum=minimum,
        on_miss=on_miss,
        rank=4,
        max_divergence=0.0 if minimum == "near" else None,
        forms="always",
    )
    store = archived(backbone, a, b)
    blind = minimum == "blind" or on_miss == "blind"
    stores = on_miss == "form" and not blind

    first = make(backbone, store, a, policy=policy)
    with watching(backbone) as seen:
        first.recall(b.id)
    assert (seen.forwards, seen.encodes) == (0 if blind else 1, 0)
    assert guarantees(first) == ["exact", "blind" if blind else "exact"]
    first.flush()
    assert len(store.ls("exact")) == (1 if stores else 0)

    again = make(backbone, store, a, policy=policy)
    with watching(backbone) as seen:
        again.recall(b.id)
    served = "blind" if blind else "patched" if stores and minimum != "exact" else "exact"
    assert guarantees(again) == ["exact", served]
    assert (seen.forwards, seen.encodes) == (1 if served == "exact" else 0, 0)
    assert weakest(slot.guarantee for slot in again.slots) == served


def test_a_patch_of_lower_rank_than_the_policys_is_a_miss(pieces):
    backbone, (a, b, *_) = pieces
    store = former_of(make(backbone, None, a, b, policy=ReusePolicy(rank=2, forms="always"))).store
    deeper = make(backbone, store, a, policy=ReusePolicy(rank=4, forms="always"))
    with watching(backbone) as seen:
        deeper.recall(b.id)
    assert seen.forwards == 1 and guarantees(deeper) == ["exact", "exact"]
    deeper.flush()
    (info,) = store.ls("exact")
    assert info.rank == 4  # the deeper patch took its place
    for rank in (2, 4):
        window = make(backbone, store, a, b, policy=ReusePolicy(rank=rank, forms="always"))
        assert window.slots[1].rank == rank and guarantees(window) == ["exact", "patched"]
    assert make(backbone, store, a, policy=ReusePolicy(rank=2, forms="always")).append(b).forwards == 0
    (info,) = store.ls("exact")
    assert info.rank == 4  # and no shallower one takes its


# -- whose patch -----------------------------------------------------------------------------------


def test_a_patch_of_other_antecedents_is_never_applied(pieces):
    backbone, (a, b, c, d) = pieces
    store = former_of(make(backbone, None, a, b, c)).store
    store2 = archived(backbone, d)
    for info in store2.ls():
        store.put(StoreAdmin(store2).read(info.key))
    for antecedents in ([b, a], [a], [b], [a, b, d], [a, a, b], [d, b]):
        window = make(backbone, store, *antecedents)
        with watching(backbone) as seen:
            window.recall(c.id)
        assert seen.forwards == 1, [x.label for x in antecedents]
        plain = Prefilled(backbone, [*antecedents, c])
        assert distance(window, len(antecedents), plain) <= 1e-4


def test_the_served_patch_is_the_one_formed_behind_them(pieces):
    """The served KV, rebuilt by hand from two plain prefills."""
    backbone, (a, b, c, _) = pieces
    policy = ReusePolicy(rank=3, forms="always")
    store = former_of(make(backbone, None, a, b, c, policy=policy)).store
    window = make(backbone, store, a, b, c, policy=policy)
    # b's own KV is that of a plain prefill where c's patch was formed: behind exact antecedents
    conditioned, alone = Prefilled(backbone, [a, b, c]).kv(2), Prefilled(backbone, [c]).kv(0)
    place = rope_index(backbone, [a, b, c])[:, -c.num_tokens :]
    offset = uniform_offset(rope_index(backbone, [c])[:, 4:], place)
    patch = form_patch(conditioned, alone, backbone.layout, offset, 3).patch
    assert worst(live(window, 2), apply_patch(alone, patch, backbone.layout, offset)) <= 1e-4


def test_near_serves_the_nearest_within_reach_and_says_so(pieces):
    backbone, (a, b, c, d) = pieces
    store = former_of(make(backbone, None, a, b, c, d)).store  # d behind (a, b, c)
    make(backbone, store, b).recall(d.id)  # d behind (b)
    near = ReusePolicy(minimum="near", max_divergence=0.5, forms="always")
    window = make(backbone, store, a, b, policy=near)  # 1/3 from (a, b, c), 1/2 from (b)
    with watching(backbone) as seen:
        window.recall(d.id)
    slot = window.slots[2]
    assert (seen.forwards, slot.guarantee) == (0, "near")
    assert slot.antecedents == (a.id, b.id, c.id)
    strict = ReusePolicy(minimum="near", max_divergence=0.3, rank=FULL_RANK, forms="always")
    window = make(backbone, store, a, b, policy=strict)
    with watching(backbone) as seen:
        window.recall(d.id)
    assert (seen.forwards, guarantees(window)) == (1, ["exact", "patched", "patched"])


def test_a_minimum_above_near_serves_nothing_near(pieces):
    backbone, (a, b, c, _) = pieces
    store = former_of(make(backbone, None, a, b, c)).store
    window = make(
        backbone, store, b, policy=ReusePolicy(minimum="patched", max_divergence=1.0, forms="always")
    )
    window.recall(c.id)
    assert guarantees(window)[1] == "exact"


# -- orbit -----------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25"])
def test_the_orbit_patch_is_the_mean_over_all_orderings(family):
    """Held against a slow loop over plain prefills."""
    backbone, (a, b, c, d) = rig(family)
    window = make(backbone, None, a, b, c, d)
    before = Snapshot.of(window)
    with watching(backbone) as seen:
        keep_orbit(window, 3)
    assert seen.encodes == 0
    assert before.matches(window)
    context = former_of(window).context
    patch = former_of(window).store.get_patch(context, d.id, [c.id, a.id, b.id], "orbit").patch
    home = rope_index(backbone, [d])[:, 4:]
    alone = Prefilled(backbone, [d]).kv(0)
    total = [{n: torch.zeros_like(t) for n, t in layer.items()} for layer in alone]
    zero = (0,) * backbone.axes
    perms = list(itertools.permutations([a, b, c]))
    for perm in perms:
        kv = Prefilled(backbone, [*perm, d]).kv(3)
        place = rope_index(backbone, [*perm, d])[:, -d.num_tokens :]
        back = uniform_offset(place, home)
        turned = apply_patch(kv, None, backbone.layout, back)
        for layer, t, own in zip(total, turned, alone, strict=True):
            for name in layer:
                layer[name] += (t[name] - own[name]) / len(perms)
    want = [{n: t[n] + own[n] for n in t} for t, own in zip(total, alone, strict=True)]
    assert worst(apply_patch(alone, patch, backbone.layout, zero), want) <= 1e-4


def test_reorder_takes_an_orbit_patch_only_if_admitted(pieces):
    backbone, (a, b, c, _) = pieces
    store = former_of(make(backbone, None, a, b, c)).store
    keep_orbit(make(backbone, store, a, b, c), 2)
    tight, loose = (
        make(backbone, store, b, a, policy=ReusePolicy(minimum=m, forms="always"))
        for m in ("patched", "orbit")
    )
    for window, served, forwards in ((loose, "orbit", 0), (tight, "exact", 1)):
        with watching(backbone) as seen:
            window.recall(c.id)
        assert (guarantees(window)[2], seen.forwards) == (served, forwards)
    # now (b, a) has an exact patch as well, formed by the tight window
    again = make(backbone, store, b, a, policy=ReusePolicy(minimum="orbit", forms="always"))
    again.recall(c.id)
    assert guarantees(again)[2] == "patched"


def test_reorder_under_orbit_runs_nothing_for_any_order(pieces):
    backbone, (a, b, c, d) = pieces
    policy = ReusePolicy(minimum="orbit", forms="always")
    store = former_of(make(backbone, None, a, b, c, d, policy=policy)).store
    keep_orbit(make(backbone, store, a, b, c, d, policy=policy), 3)
    for order in itertools.permutations(range(3)):
        window = make(backbone, store, *[(a, b, c)[i] for i in order], policy=policy)
        with watching(backbone) as seen:
            window.recall(d.id)
        assert seen.forwards == 0
        assert guarantees(window)[3] == ("patched" if order == (0, 1, 2) else "orbit")


def test_an_orbit_slot_whose_antecedent_leaves_is_near(pieces):
    backbone, (a, b, c, _) = pieces
    policy = ReusePolicy(minimum="orbit", forms="always")
    store = former_of(make(backbone, None, a, b, c, policy=policy)).store
    keep_orbit(make(backbone, store, a, b, c, policy=policy), 2)
    window = make(backbone, store, b, a, policy=policy)
    window.recall(c.id)
    window.slide()
    assert guarantees(window) == ["exact", "near"]


# -- the order of guarantees -----------------------------------------------------------------------


# -- promise 6: what a key binds -------------------------------------------------------------------


def test_another_system_prompt_tenant_dtype_or_weight_is_a_miss(pieces, tmp_path):
    """A stored chunk and its patch serve the very same model, prompt and tenant; nothing else.

    Encodings are shared by prompts and by models with one tower, canonicals by prompts, as bases.
    """
    from kamera.engines.hf import HfEngine
    from tests.models import samples, tiny
    from tests.window.rig import SYSTEM

    def work(backbone, system=SYSTEM, tenant=""):
        """Forwards of a window of two chunks that this store has seen before, or not."""
        with ChunkStore.open(tmp_path / "store", tenant=tenant) as store, watching(backbone) as seen:
            window = KameraWindow(backbone, store, system, policy=ReusePolicy(rank=FULL_RANK, forms="always"))
            anchor = seen.forwards
            for seed in range(2):
                window.append(samples.chunk(backbone, samples.sample(FAMILY, seed)))
            return seen.forwards - anchor, seen.encodes

    nudged = HfEngine(tiny.build(FAMILY))
    fresh, known = (3, 2), (0, 0)
    assert work(HfEngine(tiny.build(FAMILY))) == fresh
    assert work(nudged) == known
    assert work(nudged, system=torch.tensor([5, 6, 7, 9])) == (2, 0)
    assert work(nudged, tenant="bob") == fresh
    assert work(HfEngine(tiny.build(FAMILY, torch.bfloat16))) == fresh
    with torch.no_grad():
        nudged.model.model.language_model.layers[1].mlp.up_proj.weight[3, 3] += 1e-3
    nudged.refresh()
    assert work(nudged) == (3, 0)
    assert work(HfEngine(tiny.build(FAMILY))) == known
