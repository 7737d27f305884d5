"""The recipe that leads nobody: what a step shows, what it predicts, and that a run goes on where it was."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kamera.testbed import COLOURS, GLYPHS, TAGS, World
from kamera.testbed.frames import CELL, DEFAULTS, pixels
from kamera.testbed.world import answer_with_frames
from lab.testbed.directories import load
from lab.testbed.unled.muon import Muon, orthogonal
from lab.testbed.unled.rows import caption, visible
from lab.testbed.unled.schedule import PHASES, WIDER, Phase, Schedule, wider
from lab.testbed.unled.train import Run, optimizers, train
from lab.testbed.unled.windows import LARGE, MEDIUM, SMALL, WIDE, episode

TWO = replace(PHASES[0], steps=2)
TINY = Schedule(tokens=500, every=1, warmup=2, watched=("LLI",), episodes=1, phases=(TWO,))
LONG = Phase("long", 1, (("LLIJ", 1.0),), order=("ago", "earlier"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("unled"), TINY)


@pytest.fixture(scope="module")
def packed(run):
    """A batch of full windows: two legends, two items frames of the same tags, questions of order."""
    return run.recipe.draw(0, LONG)


def rows(packed):
    """Token places of every row, and its block."""
    for block in packed.shape.blocks:
        for first in range(block.first, block.stop, block.length):
            yield range(first, first + block.length), block


def test_a_row_sees_the_anchor_some_frames_and_itself_only(packed):
    mask, spans = packed.batch.mask[0, 0], packed.batch.spans
    places = {"anchor": range(spans[0][0])} | {i: range(*span) for i, span in enumerate(spans)}
    seen_alone = set()
    for row, _ in rows(packed):
        for step, token in enumerate(row):
            seen = set(mask[token].nonzero().flatten().tolist())
            frames = {i for i in range(len(spans)) if set(places[i]) & seen}
            want = set(places["anchor"]).union(*(places[i] for i in frames), row[: step + 1])
            assert seen == want
        if len(frames) == 1:
            seen_alone |= frames
    assert seen_alone == set(range(len(spans))), "each frame has a caption that sees no other"
    end = packed.shape.end
    assert torch.equal(mask[:end, :end], torch.ones(end, end, dtype=torch.bool).tril())
    assert torch.equal(visible(packed.shape), packed.batch.mask)


@pytest.mark.slow
def test_rows_without_a_mask_equal_masked_attention(run, packed):
    generator = torch.Generator()
    with torch.no_grad():
        fast, parts = run.recipe.loss(packed, generator.manual_seed(1))
        run.recipe.attention.shape = None
        slow, others = run.recipe.loss(replace(packed, shape=None), generator.manual_seed(1))
    assert abs(float(fast - slow)) < 1e-4 and parts.keys() == others.keys() == {*parts, "order"}
    blocks = packed.shape.blocks
    broken = replace(packed.shape, blocks=(replace(blocks[0], sees=blocks[-1].sees), *blocks[1:]))
    with torch.no_grad():
        other, _ = run.recipe.loss(replace(packed, shape=broken), generator.manual_seed(1))
    assert abs(float(other - slow)) > 1e-4


def test_every_target_is_the_token_that_follows(packed):
    ids = packed.batch.input_ids
    for name, target in packed.targets.items():
        at = (target >= 0).nonzero()
        assert len(at) > 0, name
        assert torch.equal(target[at[:, 0], at[:, 1]], ids[at[:, 0], at[:, 1] + 1]), name
        assert int(at[:, 1].min()) >= packed.shape.end, "no picture and no chunk is predicted"


def test_rows_say_the_truth_of_their_window(run, packed):
    said = set()
    for number, shown in enumerate(packed.batch.episodes):
        for row, block in rows(packed):
            text = run.tokenizer.decode(packed.batch.input_ids[number, list(row)])
            spans = packed.batch.spans
            sees = [i for i, span in enumerate(spans) if slice(*span) in block.sees]
            words = (
                text.replace("<|im_end|>\n<|im_start|>assistant\n", " ").removesuffix("<|im_end|>").split()
            )
            said.add(words[0])
            if words[0] == "tag":
                _, tag, glyph, colour = words
                (index,) = sees
                frames = shown.frames[: index + 1]
                assert GLYPHS[shown.frames[index].glyph_of[TAGS.index(tag)]] == glyph
                assert answer_with_frames(frames, "value", TAGS.index(tag))[0] == colour
            elif words[0] == "glyph" and words[1] != "of":
                (index,) = sees
                assert COLOURS[shown.frames[index].colour_of[GLYPHS.index(words[1])]] == words[2]
            elif words[0] in ("value", "glyph", "colour"):
                names = GLYPHS if words[0] == "colour" else TAGS
                subject = names.index(words[3].removesuffix("?"))
                assert answer_with_frames(shown.frames, words[0], subject)[0] == words[4]
    assert said == {"tag", "glyph", "value", "colour", "frames", "earlier"}


def test_the_decoder_is_trained_and_the_vision_tower_is_not(run):
    muon, adamw = optimizers(run.model, TINY)
    by_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    by_adamw = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert by_muon.isdisjoint(by_adamw)
    for name, parameter in run.model.named_parameters():
        text = name.startswith("model.language_model.")
        assert (id(parameter) in by_muon | by_adamw) is text is parameter.requires_grad, name
        assert (id(parameter) in by_muon) is (".layers." in name and parameter.ndim == 2), name


def test_muon_steps_along_nearly_orthogonal_matrices():
    torch.manual_seed(0)
    drawn = torch.randn(3, 16, 40)
    for matrices in (drawn, drawn.mT):
        values = torch.linalg.svdvals(orthogonal(matrices))
        assert values.shape == (3, 16) and values.min() > 0.5 and values.max() < 1.3
    weight = torch.nn.Parameter(torch.zeros(32, 8))
    weight.grad = torch.randn(32, 8)
    step = Muon([weight], lr=0.1)
    step.step()
    spectrum = torch.linalg.svdvals(weight.detach())
    assert spectrum.max() < 0.1 * 2 * 1.3 and spectrum.min() > 0.1 * 2 * 0.5
    assert float((weight.detach() * weight.grad).sum()) < 0, "downhill"


def test_small_windows_are_small_and_mostly_about_what_was_shown():
    rng = np.random.default_rng(0)
    episodes = [episode(rng, "LLI", SMALL) for _ in range(40)]
    bound = [q.bound for one in episodes for q in one.questions if q.kind == "value"]
    assert 0.7 < np.mean(bound) < 0.95
    assert np.array(episodes[0].frames[0].cells).shape == (4, 4)
    assert np.array(episodes[0].frames[2].cells).shape == (6, 6)


def test_the_pace_warms_up_stays_and_falls_straight():
    schedule = replace(TINY, warmup=10, phases=(replace(PHASES[0], steps=60), replace(PHASES[1], steps=40)))
    pace = [schedule.pace(step) for step in range(100)]
    assert pace[0] == 0.1 and pace[9:60] == [1.0] * 51
    assert np.allclose(np.diff(pace[61:98]), -1 / 40)
    assert [schedule.phase(step).name for step in (0, 59, 60, 99)] == ["small", "small", "full", "full"]
    with pytest.raises(ValueError, match="100"):
        schedule.phase(100)


@pytest.mark.slow
def test_a_run_that_stops_goes_on_to_the_same_weights(tmp_path):
    whole = train(tmp_path / "whole", TINY)
    train(tmp_path / "parts", TINY, limit=1)
    parts = train(tmp_path / "parts", TINY)
    for (name, one), other in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    told = json.loads((tmp_path / "parts" / "training.json").read_text())
    assert [entry["step"] for entry in told["history"]] == [1, 2]
    assert (tmp_path / "parts" / "model" / "model.safetensors").stat().st_size < 6_500_000


@pytest.mark.slow
def test_a_phase_whose_judge_falls_ends_at_its_best_weights(run):
    first = replace(PHASES[0], steps=50)
    run.schedule = replace(TINY, phases=(first, replace(PHASES[1], steps=50)))
    parts = run.advance()
    run.best = -1.0
    run.score(parts)
    kept = [p.detach().clone() for p in run.model.parameters()]
    parts = run.advance()
    run.best = 2.0  # nothing reaches that
    run.score(parts)
    assert run.history[-1]["ended"] == "small"
    assert all(torch.equal(a, b) for a, b in zip(kept, run.model.parameters(), strict=True))
    assert run.schedule.phase(run.step + run.skipped).name == "full"
    assert run.step == 2 and run.step + run.skipped == 50


def test_a_rename_is_captioned_with_what_replaces_it_and_its_colour():
    legend, rename = World(3).episode(0, layout="LR").frames
    said = {caption([legend], rename, fact) for fact in rename.facts}
    for line, fact in zip(sorted(said), sorted(rename.facts, key=lambda f: GLYPHS[f.glyph]), strict=True):
        colour = legend.colour_of.get(fact.target, DEFAULTS[fact.target])
        assert line == f"glyph {GLYPHS[fact.glyph]} {GLYPHS[fact.target]} {COLOURS[colour]}"


@pytest.mark.slow
def test_a_wider_run_goes_on_from_the_backbone_and_trains_its_tower(tmp_path):
    schedule = replace(wider("gqa", 0), tokens=500, every=9, phases=(replace(WIDER[0], steps=2),))
    run, started = Run(tmp_path, schedule), load("gqa-unled")[0].state_dict()
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    assert all(torch.equal(p, started[name].to(p.dtype)) for name, p in before.items())
    run.advance()
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)


@pytest.mark.parametrize("size", [MEDIUM, WIDE, LARGE])
def test_larger_pictures_state_the_facts_of_small_ones_and_show_patchwork_in_part_of_the_rest(size):
    one = episode(np.random.default_rng(0), "LI", size)
    for frame in one.frames:
        cells = np.array(frame.cells)
        assert cells.shape == (size.legend, size.legend) and set(cells[cells >= 0]) == set(
            range(len(frame.facts))
        )
        shown, stated = np.array(frame.image), pixels([frame])[0]
        blocks = (len(cells), CELL, len(cells), CELL, 3)
        patched = (shown != stated).reshape(blocks).any(axis=(1, 3, 4))
        assert not patched[cells >= 0].any(), "a fact is painted over"
        assert 0.35 < patched[cells < 0].mean() < 0.65
