"""The least guarantee a window may serve, and what happens otherwise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from kamera.ops import PatchBudget, layers_of
from kamera.patches import GUARANTEES, Guarantee, at_least

OnMiss = Literal["form", "prefill", "blind"]
Archive = Literal["now", "later"]
PositionRule = Literal["compact", "keep"]
OnLeave = Literal["keep", "repair", "exact"]
"""What becomes of chunks whose antecedents change: kept, brought under the policy, or prefilled."""


def certified_by_default() -> bool:
    """Whether a policy asks for a certificate when its maker does not say.

    Yes, except under ``KAMERA_CERTIFIED=0``: tests of one's own code, which are about what is served and
    not about who may, set that for their process.
    """
    said = os.environ.get("KAMERA_CERTIFIED", "")
    if said not in ("", "0", "1"):
        raise ValueError(f'KAMERA_CERTIFIED={said!r} is neither "0" nor "1"')
    return said != "0"


@dataclass(frozen=True)
class ReusePolicy:
    """The least guarantee that is served, and what happens when nothing stored reaches it.

    ``minimum`` holds for chunks that arrive at a place (append, recall, reorder). Chunks that stay
    while others leave (slide, evict) become survivors under every minimum but "exact": keeping them
    costs no forward, and under "exact" they are prefilled again. No chunk arrives as a survivor, so
    "survivor" asks of arrivals what "orbit" does.

    ``on_miss``: "form" runs a conditioned forward and stores its patch, "prefill" runs it and stores
    nothing, "blind" serves the canonical without conditioning.

    ``rank`` and ``patch_bytes`` bound the patches that are formed: so many directions per layer and
    channel at most, and that share of the chunk's KV bytes (`kamera.ops.budget`, docs/patches.md; None:
    whatever the rank takes). ``layers`` are the only ones that are corrected (a list or ``"a:b"``; None:
    all). A stored patch that was held shorter, or corrects fewer layers, is a miss.

    ``max_divergence`` lets a patch of *other* antecedents serve as "near": the largest share of
    chunks in which the two antecedent sets may differ (0.0 to 1.0; 1.0 takes any patch however
    stale). None, the default, never does, whatever ``minimum`` is.

    ``certified`` serves less than "exact" only on a backbone whose certificate says that it is safe
    (`kamera certify MODEL`); without one every chunk is prefilled exactly, as if ``minimum`` were
    "exact", and `UncertifiedBackbone` is warned once. The default is `certified_by_default`.
    """

    minimum: Guarantee = "patched"
    on_miss: OnMiss = "form"
    rank: int = 32
    patch_bytes: float | None = 0.03
    layers: Sequence[int] | str | None = None
    max_divergence: float | None = None
    certified: bool = field(default_factory=certified_by_default)

    def __post_init__(self) -> None:
        if self.minimum not in GUARANTEES:
            raise ValueError(f"minimum {self.minimum!r} is none of {', '.join(GUARANTEES)}")
        if self.on_miss not in get_args(OnMiss):
            raise ValueError(f"on_miss {self.on_miss!r} is none of {', '.join(get_args(OnMiss))}")
        if self.minimum == "exact" and self.on_miss == "blind":
            raise ValueError(
                'minimum "exact" with on_miss "blind" contradict: use on_miss "form" or "prefill"'
            )
        object.__setattr__(self, "layers", layers_of(self.layers))
        _ = self.budget  # it refuses what is no budget
        if self.max_divergence is not None and not 0.0 <= self.max_divergence <= 1.0:
            raise ValueError(f"max_divergence {self.max_divergence} must lie between 0.0 and 1.0")

    def admits(self, guarantee: Guarantee) -> bool:
        """True when an arriving chunk may be served so."""
        return at_least(guarantee, self.minimum)

    @property
    def budget(self) -> PatchBudget:
        """How large a patch may be."""
        return PatchBudget(self.rank, self.patch_bytes, layers_of(self.layers))

    def as_cheap(self) -> ReusePolicy:
        """Serves what is stored for these very antecedents and runs no forward for a miss."""
        return self._strictly("orbit" if self.admits("orbit") else "patched", "blind")

    def as_forming(self) -> ReusePolicy:
        """Prefills on every miss and keeps the patches."""
        return self._strictly("exact" if self.minimum == "exact" else "patched", "form")

    def _strictly(self, minimum: Guarantee, on_miss: OnMiss) -> ReusePolicy:
        # a patch of other antecedents could hold the very chunk whose absence is asked about
        return replace(self, minimum=minimum, on_miss=on_miss, max_divergence=None)

    def exactly(self) -> ReusePolicy:
        """What is left of the policy on a backbone that may not serve less than exact KV."""
        return replace(self, minimum="exact", on_miss="prefill" if self.on_miss == "blind" else self.on_miss)
