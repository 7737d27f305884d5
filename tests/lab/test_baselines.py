"""The rivals: what each recomputes, what it pays for that, and where it must be exact."""

import functools

import pytest
import torch

from kamera.engines.hf import forwards
from kamera.engines.hf.encode import with_batch
from kamera.errors import UnsupportedBackbone
from kamera.ops import kv_bytes, kv_concat, kv_map, kv_of
from lab.arms import known_arms, parse_arm
from lab.baselines.rows import live_layers, row_bytes, spread, tokens_afforded
from lab.baselines.sink import SINKS
from lab.scene import Scene
from tests.engines.compare import relative, worst
from tests.lab.scenes import FAMILIES, FULL, questions
from tests.lab.scenes import scene_of as new_scene
from tests.models.tiny import build
from tests.window.rig import same_bits

family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
TOKENS = ("sink", "first-k", "cacheblend", "deviation-oracle", "vlcache", "query-oracle")
RECOMPUTED = ("sink", "first-k", "cacheblend", "vlcache")
EXACT = ("first-k", "deviation-oracle", "vlcache", "query-oracle")
tokens_of_the_chunk = pytest.mark.parametrize("kind", TOKENS)

scene_of = functools.cache(new_scene)


def serve(scene: Scene, name: str, question: torch.Tensor | None = None):
    """The arm's answer, with a question where it wants one."""
    arm = parse_arm(name)
    asked = questions(5)[0] if question is None else question
    return arm.serve(scene, asked if arm.per_question else None)


def changed(scene: Scene, kv) -> list[list[int]]:
    """Tokens whose KV is no longer blind, per layer."""
    out = []
    for layer, blind in zip(kv, scene.blind, strict=True):
        moved = [(layer[n] != blind[n]).any(2).any(0) for n in blind]
        out.append(torch.stack(moved).any(0).nonzero()[:, 0].tolist() if moved else [])
    return out


def norms(scene: Scene, layers=None) -> torch.Tensor:
    """‖KV(B|A) − blind‖ per token over ``layers`` (all), taken at the chunk's place."""
    total = torch.zeros(scene.target.num_tokens, dtype=torch.float64)
    for i, (true, blind) in enumerate(zip(scene.conditioned, scene.blind, strict=True)):
        if layers is None or i in layers:
            for n in true:
                total += (true[n].double() - blind[n].double()).square().sum((0, 2))
    return total.sqrt()


# -- names and budgets -----------------------------------------------------------------------------


def test_every_rival_has_a_name():
    named = {f"{kind}@m" for kind in (*TOKENS, "low-rank-k", "layers")}
    assert named <= set(known_arms())
    for kind in (*TOKENS, "low-rank-k", "layers"):
        arm = parse_arm(f"{kind}@7")
        assert arm.name == f"{kind}@7"
        assert arm.per_question == (kind == "query-oracle")


@family
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 6])
def test_no_rival_stores_more_than_a_plain_patch_of_that_rank(family, rank):
    scene = scene_of(family)
    for kind in (*TOKENS, "low-rank-k"):
        served = serve(scene, f"{kind}@{rank}")
        assert served.nbytes <= scene.budget(rank), kind


@family
@tokens_of_the_chunk
def test_what_is_changed_is_paid_for(family, kind):
    scene = scene_of(family)
    served = serve(scene, f"{kind}@4")
    sizes, tokens = row_bytes(scene), changed(scene, served.kv)
    paid = sum(sizes[i] * len(tokens[i]) for i in live_layers(scene))
    assert 0 < paid <= served.nbytes
    # at most one row per layer of the budget is left unused
    left = tokens_afforded(scene, 4) * sum(sizes[1:]) - served.nbytes
    assert 0 <= left < sum(sizes[1:])


@family
def test_a_budget_in_tokens_is_that_of_the_paper(family):
    scene = scene_of(family)
    per_token = kv_bytes(scene.canonical) // scene.target.num_tokens
    assert tokens_afforded(scene, 3) == scene.budget(3) // per_token
    assert tokens_afforded(scene, FULL) == scene.target.num_tokens


def test_rows_are_spread_in_proportion_and_overflow_moves_on():
    scene = scene_of("qwen2_5_vl")
    tokens, afforded = scene.target.num_tokens, tokens_afforded(scene, 4)
    assert (tokens, afforded, len(scene.layout)) == (12, 5, 3)
    assert spread(scene, 4, [1.0, 1.0, 1.0]) == [0, 5, 5]
    assert spread(scene, 4, [0.0, 3.0, 7.0]) == [0, 3, 7]
    assert spread(scene, 6, [0.0, 1.0, 99.0]) == [0, 4, 12]  # 8 tokens at two layers
    assert spread(scene, 4, [1.0, 0.0, 0.0]) == [0, 0, 0]


# -- exact where they must be ----------------------------------------------------------------------


@family
@tokens_of_the_chunk
def test_with_a_budget_for_every_token_a_rival_is_the_reprefill(family, kind):
    scene = scene_of(family)
    assert worst(serve(scene, f"{kind}@{FULL}").kv, scene.conditioned) <= 1e-5


@family
@pytest.mark.parametrize("kind", EXACT)
def test_every_row_served_is_that_of_the_reprefill(family, kind):
    scene = scene_of(family)
    kv = serve(scene, f"{kind}@4").kv
    for i, tokens in enumerate(changed(scene, kv)):
        for n in kv[i] if tokens else ():
            assert relative(kv[i][n][:, tokens], scene.conditioned[i][n][:, tokens]) <= 1e-5


@family
def test_partial_layers_end_at_the_last_and_all_are_reprefill(family):
    scene = scene_of(family)
    count, tokens = len(scene.layout), scene.target.num_tokens
    assert worst(serve(scene, "layers@100").kv, scene.conditioned) <= 1e-5
    for percent, deep in ((1, 1), (34, 2), (60, 2)):
        served = serve(scene, f"layers@{percent}")
        assert same_bits(served.kv[: count - deep], scene.blind[: count - deep])
        # the first of them enters on canonical input: its keys and values are the reused ones
        entry = slice(count - deep, count - deep + 1)
        assert worst(served.kv[entry], scene.blind[entry]) <= 1e-5
        assert served.nbytes == kv_bytes(kv_of(served.kv[count - deep :]))
        assert served.tokens_recomputed == pytest.approx(tokens * deep / count)
        assert served.forwards == 1
    # the layer after it reads what that one absorbed
    assert worst(served.kv[-1:], scene.blind[-1:]) > 1e-2


# -- which tokens ----------------------------------------------------------------------------------


@family
def test_first_k_recomputes_the_head_and_sink_both_ends(family):
    scene = scene_of(family)
    count, tokens = tokens_afforded(scene, 6), scene.target.num_tokens
    assert SINKS < count < tokens
    first = changed(scene, serve(scene, "first-k@6").kv)
    sink = changed(scene, serve(scene, "sink@6").kv)
    tail = list(range(tokens - (count - SINKS), tokens))
    for i in live_layers(scene):
        assert first[i] == list(range(count))
        assert sink[i] == [*range(SINKS), *tail]


@family
def test_the_deviation_oracle_takes_tokens_of_largest_deficit(family):
    scene = scene_of(family)
    want = norms(scene).topk(tokens_afforded(scene, 4)).indices.sort().values.tolist()
    got = changed(scene, serve(scene, "deviation-oracle@4").kv)
    assert want != list(range(len(want)))
    assert all(got[i] == want for i in live_layers(scene))


@family
def test_cacheblend_narrows_from_its_check_layers_deviation(family):
    scene = scene_of(family)
    served = serve(scene, "cacheblend@4")
    tokens = changed(scene, served.kv)
    check, *deeper = live_layers(scene)
    # at the check layer every token's fresh KV is that of a re-prefill
    share = sum(
        (scene.conditioned[check][n] - t).double().square().sum((0, 2)) / t.double().square().sum()
        for n, t in scene.blind[check].items()
    )
    count = len(tokens[check])
    assert tokens[check] == share.topk(count).indices.sort().values.tolist()
    for here, below in zip([check, *deeper], deeper, strict=False):
        assert set(tokens[below]) < set(tokens[here])
    assert count > tokens_afforded(scene, 4) > len(tokens[deeper[-1]])


@family
def test_vlcache_gives_longer_heads_to_layers_of_larger_deficit(family):
    scene = scene_of(family)
    heads = changed(scene, serve(scene, "vlcache@3").kv)
    assert all(tokens == list(range(len(tokens))) for tokens in heads)
    share = [
        sum(relative(b[n], t[n]) ** 2 * float(t[n].norm() / b[n].norm()) ** 2 for n in t)
        for t, b in zip(scene.conditioned, scene.blind, strict=True)
    ]
    live = live_layers(scene)
    assert [len(heads[i]) for i in sorted(live, key=lambda i: share[i])] == sorted(
        len(heads[i]) for i in live
    )
    assert len({len(heads[i]) for i in live}) > 1


@family
def test_the_query_oracle_takes_what_this_question_attends_to(family):
    scene = scene_of(family)
    asked, other = questions(5, 7)
    tokens = changed(scene, serve(scene, "query-oracle@3", asked).kv)
    places = scene.question_positions(5)
    before, count = scene.context_positions.shape[1], tokens_afforded(scene, 3)
    eager = build(family)
    eager.set_attn_implementation("eager")
    weights = eager(
        input_ids=asked[None],
        position_ids=with_batch(places),
        past_key_values=forwards.make_cache(scene.backbone, [kv_concat([scene.context, scene.conditioned])]),
        output_attentions=True,
    ).attentions
    for i in live_layers(scene):
        mass = weights[i][0, ..., before : before + scene.target.num_tokens].sum((0, 1))
        assert tokens[i] == mass.topk(count).indices.sort().values.tolist()
    assert tokens != changed(scene, serve(scene, "query-oracle@3", other).kv)


# -- keys at low rank ------------------------------------------------------------------------------


@family
def test_low_rank_keys_leave_values_blind(family):
    scene = scene_of(family)
    small, full = (serve(scene, f"low-rank-k@{rank}").kv for rank in (2, FULL))
    for i in range(len(scene.layout)):
        for n, true in scene.conditioned[i].items():
            if n == "v":
                assert torch.equal(small[i][n], scene.blind[i][n])
                assert torch.equal(full[i][n], scene.blind[i][n])
            else:
                assert relative(full[i][n], true) <= 1e-5
                assert relative(small[i][n], true) <= relative(scene.blind[i][n], true) + 1e-6


def test_keys_worse_than_reused_ones_are_not_stored():
    scene = scene_of("qwen2_5_vl").behind([])  # nothing before it: the canonical's keys are the true ones
    served = serve(scene, "low-rank-k@1")
    assert served.nbytes == 0
    assert same_bits(served.kv, scene.blind)


# -- price and manners -----------------------------------------------------------------------------


@family
def test_recompute_is_counted_where_it_happens(family):
    scene = scene_of(family)
    scene.blind, scene.conditioned, scene.context  # noqa: B018 - what every arm shares
    tokens, afforded = scene.target.num_tokens, tokens_afforded(scene, 4)
    for kind in RECOMPUTED:
        arm = parse_arm(f"{kind}@4")
        with scene.backbone.measure() as work:
            served = arm.serve(scene)
        assert (work.forwards, work.vision_encodes) == (served.forwards, 0) == (1, 0), kind
        if kind in ("sink", "first-k"):
            assert served.tokens_recomputed == work.tokens == afforded
        # a filter runs every token at first, a layer's narrower head leaves the longest to run
        assert afforded <= served.tokens_recomputed <= work.tokens <= tokens
    for kind in ("deviation-oracle", "query-oracle"):
        served = serve(scene, f"{kind}@4")
        assert (served.forwards, served.tokens_recomputed) == (1, tokens)


@family
@pytest.mark.parametrize("name", [*(f"{kind}@4" for kind in (*TOKENS, "low-rank-k")), "layers@60"])
def test_nothing_the_scene_holds_is_written(family, name):
    scene = scene_of(family)
    held = [scene.canonical, scene.blind, scene.context, scene.conditioned]
    copies = [kv_map(kv, torch.clone) for kv in held]
    served = serve(scene, name)
    assert all(same_bits(a, b) for a, b in zip(held, copies, strict=True))
    assert worst(served.kv, scene.blind) > 1e-4


@tokens_of_the_chunk
def test_a_budget_below_one_token_is_blind_reuse(kind):
    scene = scene_of("kimi_k25")
    sizes = sum(row_bytes(scene))
    assert tokens_afforded(scene, 1) == scene.budget(1) // sizes
    starved = new_scene("kimi_k25")
    starved.budget = lambda rank: sizes - 1  # type: ignore[method-assign]
    served = serve(starved, f"{kind}@1")
    assert served.nbytes == 0
    assert worst(served.kv, scene.blind) <= 1e-6


@pytest.mark.parametrize("percent", [0, 101])
def test_a_share_of_layers_is_a_percentage(percent):
    with pytest.raises(ValueError, match="layers"):
        parse_arm(f"layers@{percent}")


def test_a_query_oracle_without_a_question_is_refused():
    with pytest.raises(ValueError, match="chooses tokens by the question"):
        parse_arm("query-oracle@4").serve(scene_of("qwen2_5_vl"))


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_a_model_that_cannot_recompute_single_tokens_is_refused(kind):
    with pytest.raises(UnsupportedBackbone, match="lets the tokens of a picture see each other"):
        serve(scene_of("gemma3"), f"{kind}@4")
