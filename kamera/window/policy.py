"""The least guarantee a window may serve, and what happens otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

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

    ``certified`` serves each guarantee below "exact" only on a backbone whose certificate found it safe
    (`kamera certify MODEL`); the others are withheld, and `UncertifiedBackbone` says once which and why.
    Without a certificate every chunk is prefilled exactly. The default is `certified_by_default`.

    ``withheld`` are guarantees that are not served although ``minimum`` admits them. Without "survivor"
    the chunks that stay are brought again by the best means that is left: their stored patch for the chunks
    that stay, or a forward.

    Raises ValueError for a value that is none of those named, or out of its range.
    """

    minimum: Guarantee = "patched"
    on_miss: OnMiss = "form"
    rank: int = 32
    patch_bytes: float | None = 0.03
    layers: Sequence[int] | str | None = None
    max_divergence: float | None = None
    certified: bool = field(default_factory=certified_by_default)
    withheld: frozenset[Guarantee] = frozenset()

    @classmethod
    def exact(cls) -> ReusePolicy:
        """Serve what a re-prefill computes and nothing else: what its antecedents change is prefilled."""
        return cls(minimum="exact", on_miss="prefill")

    @classmethod
    def balanced(cls) -> ReusePolicy:
        """Serve what a certificate found safe: patches, and survivors, which are repaired elsewhere."""
        return cls(certified=True)

    @classmethod
    def streaming(cls) -> ReusePolicy:
        """Serve patches and survivors, and ask for no certificate: a survivor still knows what has left."""
        return cls(certified=False)

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
        object.__setattr__(self, "withheld", frozenset(self.withheld))
        for guarantee in sorted(self.withheld):
            if guarantee == "exact" or guarantee not in GUARANTEES:
                raise ValueError(f"withheld {guarantee!r} is none of {', '.join(GUARANTEES[1:])}")
        _ = self.budget  # it refuses what is no budget
        if self.max_divergence is not None and not 0.0 <= self.max_divergence <= 1.0:
            raise ValueError(f"max_divergence {self.max_divergence} must lie between 0.0 and 1.0")

    def admits(self, guarantee: Guarantee) -> bool:
        """True when an arriving chunk may be served so."""
        return guarantee not in self.withheld and at_least(guarantee, self.minimum)

    def keeps(self, guarantee: Guarantee) -> bool:
        """True when a chunk that is worth this may stay where it is: under "exact" no other may."""
        return guarantee == "exact" or (self.minimum != "exact" and guarantee not in self.withheld)

    def without(self, guarantees: Iterable[Guarantee]) -> ReusePolicy:
        """Serves all it did but these."""
        withheld = self.withheld.union(guarantees)
        blind = self.on_miss == "blind" and "blind" in withheld
        return replace(self, withheld=withheld, on_miss="prefill" if blind else self.on_miss)

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

    def as_exact(self) -> ReusePolicy:
        """What is left of the policy on a backbone that may not serve less than exact KV."""
        return replace(self, minimum="exact", on_miss="prefill" if self.on_miss == "blind" else self.on_miss)

    def to_info(self) -> dict[str, Any]:
        """As it stands in a saved window: keyword arguments of JSON types."""
        return asdict(self) | {"withheld": sorted(self.withheld)}
