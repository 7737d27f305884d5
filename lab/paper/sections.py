"""What each table of the page shows, in words."""

from __future__ import annotations

from typing import NamedTuple

from lab.paper import basis, depth, envelope, modality, recall, refresh, reorder, survivors

INTRODUCTION = (
    "Small backbones trained from scratch on the testbed's world, through the real classes. Multi-hop "
    "questions join what the items frame shows with what one (two hops) or two (three hops) frames before "
    "it say; the items frame's KV is what an arm serves, everything else is exact. One-hop questions are "
    "read in the items frame alone. η = 1 − KL(arm ‖ re-prefill) / KL(blind ‖ re-prefill). Brackets are "
    "95 % bootstrap intervals over questions; several questions share a window, so they are a little "
    "narrow. Chance is 1/16."
)


class Section(NamedTuple):
    """A table: its rows' name, its heading, what was done, and what its cells give beside accuracy."""

    name: str
    title: str
    what: str
    shows: str = "eta"


SECTIONS: tuple[Section, ...] = (
    Section(
        reorder.NAME,
        "3. Reorder",
        "The ordering's own patch (exact), one patch of the mean over the *other* orderings (orbit: all of "
        "them for K = 3 and 4, 24 sampled for 6), and that of the straight ordering (transfer).",
    ),
    Section(
        recall.NAME,
        "4. Recall",
        "The items frame comes back behind three antecedents. Stale: the patch formed when the first 0 to "
        "3 of them were others. Fresh: formed behind these.",
    ),
    Section(
        survivors.NAME,
        "5. Survivors",
        "The oldest of four antecedents leaves. Keep: the conditioned KV, turned only (it is no canonical, "
        "so all of it counts as stored).",
        "kl",
    ),
    Section(
        survivors.BOUND,
        "5b. Survivors, bound to what left",
        "The older of two antecedents leaves, and only questions are asked whose answer the items frame "
        "had read from it. What is right is what the window shows now.",
        "kl",
    ),
    Section(
        envelope.NAME,
        "6. Envelope",
        "The patch of drifted antecedents served behind the real ones, against a rebuilt patch.",
    ),
    Section(
        envelope.SUPERSET,
        "6b. Envelope, distractors in front",
        "0 to 3 pictures without facts come in front of two antecedents. Stale: the patch of the two "
        "alone, moved.",
    ),
    Section(
        refresh.NAME,
        "7. Refresh",
        "0 to 3 of three antecedents were swapped since the old patch was formed. An update is added to "
        "the old patch; bytes are those sent anew.",
    ),
    Section(
        depth.NAME,
        "8. Depth",
        "The plain patch on the deepest layers only, and on one layer alone. Layer 0 never differs, so all "
        "layers but it are all.",
    ),
    Section(
        basis.NAME,
        "9. Shared basis",
        "As many directions pooled over other episodes (only coefficients are stored per chunk) as of the "
        "item's own SVD.",
    ),
    Section(
        modality.NAME,
        "10. Modality",
        "The same facts as pictures and as words, and the same frames cut into chunks in other ways.",
    ),
)
"""Tables of one form, in order; the deficit and the frontier have their own."""
