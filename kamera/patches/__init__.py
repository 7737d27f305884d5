"""What is stored of chunks, and how what is missing is formed: for windows and `kamera compile`."""

from kamera.patches.anchor import Anchor, anchor_ids, anchor_of, prefill_anchor
from kamera.patches.catalogue import Catalogue
from kamera.patches.chunks import Copy, Facts
from kamera.patches.former import Former, own
from kamera.patches.guarantee import GUARANTEES, Guarantee
from kamera.patches.losses import Losses, Strict
from kamera.patches.orderings import how_many, orderings
from kamera.patches.standing import compact_positions

__all__ = [
    "GUARANTEES",
    "Anchor",
    "Catalogue",
    "Copy",
    "Facts",
    "Former",
    "Guarantee",
    "Losses",
    "Strict",
    "anchor_ids",
    "anchor_of",
    "compact_positions",
    "how_many",
    "orderings",
    "own",
    "prefill_anchor",
]
