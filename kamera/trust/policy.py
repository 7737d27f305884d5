"""The least guarantee that a window serves, and what happens where nothing stored reaches it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from kamera.errors import quote
from kamera.ops import PatchBudget, layers_of
from kamera.trust.guarantee import GUARANTEES, Guarantee, at_least
from kamera.trust.report import CertifyReport

OnMiss = Literal["form", "prefill", "blind"]
"""What happens to a chunk for which nothing that is stored reaches the policy's minimum."""
ArchiveRule = Literal["now", "later"]
"""When a new chunk is archived: when it is appended, or when it leaves."""
Forms = Literal["returning", "always"]
OnLeave = Literal["keep", "repair", "exact"]
"""Treatment of chunks whose antecedents leave: kept, placed anew under the policy, or prefilled."""


@dataclass(frozen=True)
class ReusePolicy:
    """The weakest guarantee that is served, and the action when nothing stored reaches it.

    ``minimum`` applies to chunks that arrive at a place (append, recall, reorder). Chunks that stay while
    others leave (slide, evict) follow ``on_leave``; under a minimum of "exact" they are prefilled again. No
    chunk arrives as a survivor, so for arrivals "survivor" is the same as "orbit".

    ``on_miss``: "form" runs a forward behind the antecedents and stores its patch. "prefill" runs it and
    stores nothing. "blind" serves the canonical, moved only.

    ``on_leave`` is the treatment of chunks that stay when others leave. "keep" runs nothing before the
    answer: the chunk that leads now is served from its canonical (exact), one with a patch stored for just
    what stands before it is "patched", the others are survivors, which still hold what they took from those
    that left (`Slot.departed` says how much). "repair" gives each the KV it would have without what has
    left: by a stored patch, else by one conditioned forward. "exact" prefills them.

    ``max_departed`` is the share of a survivor's antecedents, by tokens, that may have left. One that has
    lost more is served with the patch behind its own predecessor, which background work forms after each
    append (guarantee "near" unless just the predecessor stands before it), where that is at hand. 1.0 keeps
    every survivor as it is, and forms no such patch.

    ``forms`` says when KV is stored. "returning", the default: a chunk that leaves is archived in the
    background, and a patch is formed in the background for antecedents that come back. "always" is for orders
    that are known to recur: each operation archives its new chunks, and each forward behind antecedents
    leaves its patch.

    ``rank`` and ``patch_bytes`` bound the patches that are formed: the number of directions per layer and
    channel, and the share of the chunk's KV bytes (`kamera.ops.budget`, docs/how-it-works.md; None: no bound
    but the rank). Only ``layers`` are corrected (a list or ``"a:b"``; None: all). A stored patch of a smaller
    budget, or with fewer layers, is a miss.

    ``max_error`` bounds the error of a patch: the share of the deficit's energy that it leaves out, in the
    worst layer and channel (0.0 to 1.0; None: no bound). A patch above it is formed larger, up to full rank;
    a stored one above it is a miss.

    ``max_divergence`` lets a patch of *other* antecedents serve as "near" where a chunk arrives: the largest
    share of chunks in which the two antecedent sets may differ (0.0 to 1.0; 1.0 takes any patch however
    stale). None, the default, serves none under any ``minimum``. Of several, the one whose set differs least
    serves.

    ``audit`` is the share of served slots, and of their tokens, that background work prefills again and
    compares with what was served (`kamera.window.background`). It counts and logs what it finds, and changes
    nothing. 0.0, the default, audits none.

    Raises ValueError for an unknown value, or one out of range.
    """

    minimum: Guarantee = "orbit"
    on_miss: OnMiss = "form"
    forms: Forms = "returning"
    rank: int = 32
    patch_bytes: float | None = 0.12
    layers: Sequence[int] | str | None = None
    max_error: float | None = None
    max_divergence: float | None = None
    on_leave: OnLeave = "keep"
    max_departed: float = 0.5
    audit: float = 0.0

    @classmethod
    def exact(cls) -> ReusePolicy:
        """Serve only KV equal to a re-prefill: chunks whose antecedents change are prefilled."""
        return cls(minimum="exact", on_miss="prefill", on_leave="exact")

    @classmethod
    def from_report(cls, path: str | os.PathLike[str], *, max_kl: float) -> ReusePolicy:
        """The policy whose every guarantee lost at most ``max_kl`` nats in a report of `kamera certify`.

        The upper end of each 95 % interval counts (`CertifyReport.settings`). Nothing ties the policy to the
        model that was measured. Raises InvalidReport for a report that is missing or damaged, ValueError for
        a bound that is no positive number.
        """
        return cls(**CertifyReport.read(path).settings(max_kl))

    def __post_init__(self) -> None:
        kinds = {"minimum": Guarantee, "on_miss": OnMiss, "forms": Forms, "on_leave": OnLeave}
        for name, kind in kinds.items():
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name} {quote(value)} is none of {', '.join(get_args(kind))}")
        if self.minimum == "exact" and self.on_miss == "blind":
            raise ValueError(
                'minimum "exact" with on_miss "blind" contradict: use on_miss "form" or "prefill"'
            )
        object.__setattr__(self, "layers", layers_of(self.layers))
        _ = self.budget  # raises for an invalid budget
        for name in ("max_error", "max_divergence", "max_departed", "audit"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} {quote(value)} must lie between 0.0 and 1.0")

    def admits(self, *guarantees: Guarantee) -> bool:
        """True if an arriving chunk may be served with one of these guarantees."""
        return at_least(min(guarantees, key=GUARANTEES.index), self.minimum)

    @property
    def moves(self) -> bool:
        """True if a stored chunk may be served elsewhere than where it was prefilled."""
        return self.minimum != "exact"

    def keeps(self, guarantee: Guarantee) -> bool:
        """True if a chunk of this guarantee may stay in place: under "exact" no other may."""
        return guarantee == "exact" or self.minimum != "exact"

    @property
    def follows(self) -> bool:
        """True if background work forms the patch of each chunk behind its own predecessor."""
        return self.minimum != "exact" and self.on_leave == "keep" and self.max_departed < 1.0

    def as_repairing(self) -> ReusePolicy:
        """The policy of a repair: a patch of exactly the chunks that remain, else a forward."""
        if self.minimum == "exact":
            return self
        on_miss: OnMiss = "form" if self.on_miss == "blind" else self.on_miss
        return self._strictly("orbit" if self.admits("orbit") else "patched", on_miss)

    @cached_property
    def budget(self) -> PatchBudget:
        """The size limits of patches."""
        return PatchBudget(self.rank, self.patch_bytes, layers_of(self.layers))

    def as_cheap(self) -> ReusePolicy:
        """The policy that serves patches of exactly these antecedents and runs no forward on a miss."""
        return self._strictly("orbit" if self.admits("orbit") else "patched", "blind")

    def as_forming(self) -> ReusePolicy:
        """The policy that prefills on every miss and stores the patches."""
        return self._strictly("exact" if self.minimum == "exact" else "patched", "form")

    def _strictly(self, minimum: Guarantee, on_miss: OnMiss) -> ReusePolicy:
        # a patch of other antecedents could contain the chunk whose absence is tested
        return replace(self, minimum=minimum, on_miss=on_miss, max_divergence=None)

    def as_exact(self) -> ReusePolicy:
        """The policy under which every chunk is prefilled."""
        on_miss: OnMiss = "prefill" if self.on_miss == "blind" else self.on_miss
        return replace(self, minimum="exact", on_miss=on_miss)

    def to_info(self) -> dict[str, Any]:
        """Keyword arguments of JSON types, as stored in a saved window."""
        return asdict(self)


def policy_of(given: ReusePolicy | None, on_leave: OnLeave | None = None) -> ReusePolicy:
    """The policy given, else the default one, with ``on_leave`` if that is given. Raises ValueError."""
    check_policy(given)
    policy = given or ReusePolicy()
    return policy if on_leave is None else replace(policy, on_leave=on_leave)


def check_policy(given: object) -> None:
    """Raise ValueError for anything but a `ReusePolicy` or None: its name, say, or one that is not called."""
    if given is None or isinstance(given, ReusePolicy):
        return
    made = ["ReusePolicy", "ReusePolicy.exact"]
    shown = getattr(given, "__qualname__", "")
    if given is ReusePolicy or shown in made:
        raise ValueError(f"policy {shown} is not called: give {shown}()")
    named = [name for name in made if isinstance(given, str) and name == f"ReusePolicy.{given.lower()}"]
    raise ValueError(
        f"policy {quote(given)} is no ReusePolicy: give {', '.join(f'{name}()' for name in named or made)}"
    )
