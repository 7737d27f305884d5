"""A probe says "safe" where patched reuse answers as re-prefill does, and never of what it cannot see."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace

import pytest
from tqdm import tqdm

from kamera import ReusePolicy, testbed
from kamera.certify import TRIALS, certify, pages
from kamera.certify import probe as probe_module
from kamera.certify.kv import KVComparison
from kamera.certify.pages import ENTRIES
from kamera.certify.probe import PER_TRIAL, PROBE_SEED, READER, Order, Query, digest_of
from kamera.certify.run import PROBES, scenes_of
from kamera.certify.sabotage import SABOTAGES
from kamera.certify.verdict import QuestionOutcome, doubt, judge, loss, wilson
from kamera.engines.hf import HfEngine
from kamera.errors import ModalityNotSupported, ProcessorRequired
from kamera.ops import PatchBudget
from kamera.window import grounds_of, library_versions
from tests.models import processors, tiny


@pytest.fixture(scope="module")
def trained():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def untrained():
    return HfEngine(processors.matching_model(), processors.picture_processor())


# -- on backbones ----------------------------------------------------------------------------------


def few_arms(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Ask of these sabotaged builds only: the others are asked in a test of their own, and take long."""
    for name in SABOTAGES.keys() - set(names):
        patch.delitem(SABOTAGES, name)


@pytest.fixture(scope="module")
def made(trained):
    """A certificate of the trained backbone, and what was said on the way to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module, "PER_TRIAL", 20)
        few_arms(patch, "no rotation")
        bar = tqdm(file=io.StringIO())
        return bar, certify(trained, probe="world", items=10, rank=32, model="testbed", bar=bar)


def test_each_guarantee_gets_a_finding_of_its_own(made):
    bar, certificate = made
    assert bar.n == 50
    assert tuple(certificate.findings) == tuple(TRIALS)
    assert set(TRIALS) == {"patched", "sampled", "orbit", "survivor", "near"}
    assert all(finding.n == 10 for finding in certificate.findings.values())
    patched = certificate.findings["patched"]
    assert patched.served.mean == patched.reprefill.mean == 1.0 > patched.blind.mean
    assert patched.verdict == "cannot tell"
    assert "10 questions are too few" in patched.reason


def test_a_few_tokens_hold_where_frames_override_each_other(made):
    sampled = made[-1].findings["sampled"]
    assert sampled.served.mean >= 0.9 * sampled.reprefill.mean > 0.5 > sampled.blind.mean


@pytest.mark.parametrize("guarantee", ["orbit", "survivor", "near"])
def test_where_frames_override_each_other_only_patches_hold(made, guarantee):
    found = made[-1].findings[guarantee]
    assert found.verdict == "unsafe", found.reason
    assert found.served.mean <= 0.7 < 0.9 < found.reprefill.mean


def test_sampled_orders_are_asked_about_and_answered(made):
    found = made[-1].findings["sampled"]
    assert found.served.mean >= 0.9 > 0.5 > found.blind.mean
    assert found.eta.mean > made[-1].findings["orbit"].eta.mean


def test_a_certificate_is_bound_to_what_it_measured(made, trained):
    certificate = made[-1]
    grounds = grounds_of(trained, PatchBudget(32, ReusePolicy.patch_bytes))
    assert certificate.difference(grounds) is None
    assert (certificate.grounds, certificate.probe, certificate.model) == (grounds, "world", "testbed")
    assert (grounds.dtype, grounds.versions) == ("float32", library_versions())
    assert len(grounds.vocabulary) == 64 and grounds.position_limit is not None
    assert "bfloat16" in certificate.difference(replace(grounds, dtype="bfloat16"))
    words = "vocabulary .* this tokenizer's is 000000000000"
    assert re.search(words, certificate.difference(replace(grounds, vocabulary="0" * 64)))
    assert "end at 7" in certificate.difference(replace(grounds, position_limit=7))
    assert "rank is 1" in certificate.difference(replace(grounds, budget=PatchBudget(1, 0.03)))


def test_the_trained_backbone_is_unsafe_at_rank_1(trained, monkeypatch):
    few_arms(monkeypatch)
    made = certify(trained, probe="world", items=10, rank=1, guarantees=["patched"])
    assert tuple(made.findings) == ("patched",)
    assert made.findings["patched"].verdict == "unsafe", made.findings["patched"].reason


def test_a_random_model_gets_cannot_tell(untrained, monkeypatch):
    few_arms(monkeypatch)
    made = certify(untrained, probe="pages", items=2, rank=16, guarantees=["patched"])
    found = made.findings["patched"]
    assert found.verdict == "cannot tell"
    assert "re-prefill answers" in found.reason
    assert found.chance < 1 / ENTRIES
    assert made.safe == ()


def test_what_cannot_be_asked_is_refused_by_name(untrained):
    with pytest.raises(ValueError, match="probe 'leaves' is none of pages, world"):
        certify(untrained, probe="leaves")
    with pytest.raises(ValueError, match="items 0"):
        certify(untrained, items=0)
    with pytest.raises(
        ValueError, match="guarantee 'blind' is none of patched, sampled, orbit, survivor, near"
    ):
        certify(untrained, guarantees=["blind"])
    with pytest.raises((ModalityNotSupported, ProcessorRequired)):
        certify(tiny.backbone("qwen2_5_vl"), items=1)


# -- the questions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_is_the_same_every_time_and_all_of_it_counts(probe):
    first, second = (list(itertools.islice(scenes_of(probe), 2)) for _ in range(2))
    assert digest_of(probe, first) == digest_of(probe, second)
    assert digest_of(probe, first) != digest_of(probe, first[:1])
    assert digest_of(probe, first) != digest_of("another", first)
    second[0].contents[-1][0]["image"].putpixel((0, 0), (1, 2, 3))
    assert digest_of(probe, first) != digest_of(probe, second)
    for scene in first:
        assert set(scene.queries) == set(TRIALS)
        for queries in scene.queries.values():
            assert 0 < len(queries) <= PER_TRIAL
            assert all(q.answer in q.options for q in queries)


@pytest.mark.parametrize("probe", PROBES)
def test_half_of_the_questions_turn_on_order_or_on_what_left(probe):
    for scene in itertools.islice(scenes_of(probe), 4):
        assert len(scene.contents) == 5
        for guarantee, queries in scene.queries.items():
            assert len(queries) % 2 == 0, "hard ones and plain ones by turns"
            texts = [q.text for q in queries]
            assert len(set(texts)) == len(texts), guarantee


@pytest.mark.parametrize("index", range(6))
def test_pages_say_what_their_questions_are_answered_by(monkeypatch, index):
    """Read as a person would: the last page in the window that says it, found in the words drawn."""
    written: list[list[str]] = []
    write = pages._write

    def spied(page, text, at, scale=2):
        if scale == 3:  # a page's title begins it
            written.append([])
        written[-1].append(text)
        write(page, text, at, scale)

    monkeypatch.setattr(pages, "_write", spied)
    scene = pages.draw_scene(PROBE_SEED, index)
    template = pages._TEMPLATES[index % 3]
    assert [lines[0] for lines in written] == [*[template.title] * 3, written[READER][0], template.title]
    about = re.compile(template.says.replace(".", r"\.").replace("{}", "(.+)"))

    def told(entry: str, order: Order) -> str:
        found = [m for i in order for line in written[i] if (m := about.fullmatch(line)) and m[1] == entry]
        return found[-1][2] if found else pages.UNKNOWN

    entry_of = re.compile(re.escape(template.asks).replace(r"\{\}", "(.+)"))
    asked = 0
    for guarantee, (_, after) in TRIALS.items():
        for query in scene.queries[guarantee]:
            if (match := entry_of.fullmatch(query.text)) and match[1] in template.entries:
                assert query.answer == told(match[1], after)
                asked += 1
            else:
                possible = {told(e, after) for e in template.entries} | {pages.UNKNOWN}
                assert query.answer in possible
    assert asked > 0
    departed = [q.answer for q in scene.queries["survivor"]]
    assert pages.UNKNOWN in departed, "what left with its page is asked about"


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ("red", "red"),
        ("The badge is Red.", "red"),
        ("It is blue, not red", "blue"),
        ("reddish", ""),
        ("", ""),
    ],
)
def test_an_answer_is_the_option_it_names_first(said, option):
    assert Query("?", "red", ("blue", "red")).read(said) == option


# -- the verdict -----------------------------------------------------------------------------------


def answers(
    n: int, *, blind: int = 0, served: int = 0, ceiling: int = 0, kls=(1.0, 0.01)
) -> list[QuestionOutcome]:
    """``n`` questions of which an arm gets the first so many wrong, and re-prefill the last so many."""
    out = []
    for i in range(n):
        prefilled = "wrong" if i >= n - ceiling else "right"
        out.append(
            QuestionOutcome(
                "right",
                prefilled,
                "off" if i < blind else prefilled,
                "off" if i < served else prefilled,
                *kls,
            )
        )
    return out


RULES = {
    "all is well": (answers(100, blind=80), "safe", "restores 1.00"),
    "one answer lost of many": (answers(200, blind=160, served=1), "safe", "restores 0.99"),
    "re-prefill is weak": (answers(100, blind=30, ceiling=60), "cannot tell", "re-prefill answers 0.40"),
    "re-prefill may be weak": (answers(12, blind=8, ceiling=4), "cannot tell", "re-prefill answers 0.67"),
    "the patch loses answers": (answers(100, blind=80, served=10), "unsafe", "changes accuracy by -0.10"),
    "the patch does nothing": (answers(100, blind=80, served=80), "unsafe", "changes accuracy"),
    "too few to rule out a loss": (answers(20, blind=15), "cannot tell", "20 questions are too few"),
    "one fewer than can rule it out": (answers(37, blind=30), "cannot tell", "38 that lose nothing"),
    "as few as can rule it out": (answers(38, blind=30), "safe", "restores 1.00"),
    "too few to know that re-prefill reads": (answers(3, blind=3), "cannot tell", "3 questions are too few"),
    "one tells nothing": (answers(1, blind=1), "cannot tell", "1 question is too few"),
    "too few flips to know": (answers(100, blind=12), "cannot tell", "100 questions are too few"),
    "half of the flips stay": (answers(400, blind=40, served=12), "unsafe", "KV restores 0.70"),
    "no gap, and the patch is seen to work": (answers(100), "safe", "closes 0.99"),
    "no gap, and nothing to close": (answers(100, kls=(0.0, 0.0)), "cannot tell", "nothing to close"),
    "no gap, a patch of zeros": (answers(100, kls=(0.1, 0.1)), "cannot tell", "do not reach"),
}


@pytest.mark.parametrize("case", RULES)
def test_the_rules_of_the_verdict(case):
    outcomes, verdict, reason = RULES[case]
    judged = judge(outcomes, chance=0.1)
    assert (judged.verdict, reason in judged.reason) == (verdict, True), judged.reason


def test_kv_that_is_wrong_is_unsafe_however_it_answers():
    right = answers(100, blind=80)
    assert judge(right, 0.1, KVComparison()).verdict == "safe"
    found = judge(right, 0.1, KVComparison(flaw="in layer 1 channel k it is scaled"))
    assert (found.verdict, found.reason) == ("unsafe", "in layer 1 channel k it is scaled")
    assert found.served.mean == 1.0


def test_kv_whose_patch_leaves_most_of_a_channel_out_cannot_be_told():
    short = KVComparison(lack="of what blind reuse lacks, the served KV has 0.04 in k")
    found = judge(answers(100, blind=80), 0.1, short)
    assert found.verdict == "cannot tell"
    assert "the served KV has 0.04 in k" in found.reason
    assert judge(answers(100, blind=80, served=80), 0.1, short).verdict == "unsafe"


def test_a_probe_that_does_not_tell_a_wrong_build_cannot_tell():
    safe, unsafe = judge(answers(100, blind=80), 0.1), judge(answers(100, blind=80, served=80), 0.1)
    undecided = judge(answers(20, blind=15), 0.1)
    assert doubt(safe, {}) == safe
    assert doubt(safe, {"no rotation": unsafe}) == safe
    found = doubt(safe, {"no rotation": safe, "stale patch": safe, "random patch": undecided})
    assert found.verdict == "cannot tell"
    assert found.reason == "the probe does not see: no rotation, stale patch"
    assert doubt(unsafe, {"no rotation": safe}) == unsafe, "what is harmful stays so"


def test_too_few_questions_to_tell_a_wrong_build_are_said_to_be():
    safe, undecided = judge(answers(100, blind=80), 0.1), judge(answers(20, blind=15), 0.1)
    found = doubt(safe, {"stale patch": undecided})
    assert found.verdict == "cannot tell"
    assert found.reason == "100 questions are too few to tell a sound build from: stale patch"


def test_a_model_that_guesses_well_is_still_weak():
    outcomes = answers(200, blind=100, ceiling=60)  # 0.70 right
    assert judge(outcomes, chance=0.1).verdict != "cannot tell"
    assert judge(outcomes, chance=0.5).verdict == "cannot tell"


def test_nothing_asked_is_a_callers_mistake():
    with pytest.raises(ValueError, match="no question"):
        judge([], chance=0.1)


def test_intervals_are_the_published_ones():
    share = wilson([True] * 8 + [False] * 2)
    assert (share.low, share.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    all_right = wilson([True] * 10)
    assert (all_right.mean, all_right.high) == (1.0, 1.0)
    assert all_right.low == pytest.approx(0.7225, abs=1e-4)
    # Agresti and Min: 10 lost, none won, of 100
    changed = loss(answers(100, served=10), "served")
    assert (changed.mean, changed.low, changed.high) == pytest.approx((-10 / 102, -0.1589, -0.0372), abs=2e-4)
