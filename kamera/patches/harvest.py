"""Which prefills leave a patch behind."""

from __future__ import annotations

from collections.abc import Callable

from kamera.patches.guarantee import Guarantee, at_least
from kamera.store import chunk_of


def worth_harvesting(
    held: Callable[[tuple[str, ...]], Guarantee | None],
    antecedents: tuple[str, ...],
    formed: Guarantee,
    leading: bool = False,
) -> bool:
    """True if the patch of a prefill behind ``antecedents`` is worth storing.

    Without antecedents it is only if ``leading``: it then corrects the conditioning on another anchor.
    ``held`` returns the guarantee behind which the stored patch for given antecedents was formed (None: none
    is stored). A copy conditioned by near or blind KV carries their error and is not harvested.
    """
    if not (antecedents or leading) or not at_least(formed, "survivor"):
        return False
    # a patch formed behind exactly these chunks serves survivors too, and better
    chunks = tuple(map(chunk_of, antecedents))
    there = (held(behind) for behind in dict.fromkeys((chunks, antecedents)))
    return not any(worth is not None and at_least(worth, formed) for worth in there)
