"""Table 5, survivors: what stays needs only to be turned, or a removal patch (paper, section 5)."""

from __future__ import annotations

from kamera.testbed import Episode
from lab.paper.draw import MAIN, NEW, TARGET, Stage
from lab.paper.tally import Tally
from lab.paper.trial import Trial
from lab.repairs import Keep, RemovalPatch

NAME = "survivors"
BOUND = "survivors, bound to what left"
OLD = "still answers as before"
RANKS = (4, 16)


def measure(stage: Stage, tally: Tally) -> None:
    """The oldest of four antecedents leaves."""
    left = NEW[0]
    _compare(NAME, stage, stage.trial(MAIN), (left, *MAIN), tally)


def measure_bound(stage: Stage, tally: Tally) -> None:
    """The older of two antecedents leaves, and only what the items frame had read from it is asked."""
    before, now = (NEW[0], MAIN[0]), (MAIN[0],)
    episode = stage.episode
    asked = read_from(stage.regime, episode, before)
    if not asked:
        return
    trial = Trial(stage.scene(now), [episode.ask(*subject, order=(*now, TARGET)) for subject in asked])
    _compare(BOUND, stage, trial, before, tally)
    kept = trial.logits(Keep(stage.chunks(before)).serve(trial.scene).kv).argmax(-1)
    old = [trial.answer_id(episode.ask(*subject, order=(*before, TARGET)).answer) for subject in asked]
    for said, answer in zip(kept.tolist(), old, strict=True):
        tally.note(BOUND, OLD, float(said == answer))


def read_from(regime: str, episode: Episode, before: tuple[int, ...]) -> list[tuple[str, int]]:
    """Questions whose answer the items frame had read from the first of ``before``.

    Where frames agree, what a later one repeats counts as read from it, too.
    """
    said_in = before if regime == "override" else before[:1]
    return [
        ("value", tag)
        for tag in episode.frames[TARGET].glyph_of
        if before[0] in episode.ask("value", tag, order=(*said_in, TARGET)).frames
    ]


def _compare(section: str, stage: Stage, trial: Trial, before: tuple[int, ...], tally: Tally) -> None:
    chunks = stage.chunks(before)
    keep = trial.judge(Keep(chunks))
    tally.add(section, "reprefill", trial.reprefill, trial.blind)
    tally.add(section, "blind", trial.blind, trial.blind)
    tally.add(section, "keep", keep, trial.blind)
    for rank in RANKS:
        # what a removal patch wins back is what keeping loses
        removal = trial.judge(RemovalPatch(rank, chunks))
        tally.add(section, "removal", removal, keep, base="keep", rank=rank)
