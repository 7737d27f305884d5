"""The least guarantee that a window may serve, and the action on a miss."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from kamera.errors import quote
from kamera.ops import MOST, PatchBudget, layers_of
from kamera.trust.guarantee import GUARANTEES, Guarantee, at_least
from kamera.trust.proof import Proof
from kamera.trust.report import CertifyReport

OnMiss = Literal["sample", "form", "prefill", "blind"]
"""What happens to a chunk for which nothing that is stored reaches the policy's minimum."""
ArchiveRule = Literal["now", "later"]
"""When a new chunk is archived: when it is appended, or when it leaves."""
Forms = Literal["returning", "always"]
OnLeave = Literal["keep", "repair", "exact"]
"""Treatment of chunks whose antecedents change: kept, placed anew under the policy, or prefilled."""


def certified_by_default() -> bool:
    """Default of `ReusePolicy.certified`: True, except under ``KAMERA_CERTIFIED=0``.

    Tests of an application, which check the KV served and not the permission to serve it, set that for their
    process.
    """
    said = os.environ.get("KAMERA_CERTIFIED", "")
    if said not in ("", "0", "1"):
        raise ValueError(f'KAMERA_CERTIFIED={quote(said)} is neither "0" nor "1"')
    return said != "0"


@dataclass(frozen=True)
class ReusePolicy:
    """The weakest guarantee that is served, and the action when nothing stored reaches it.

    ``minimum`` applies to chunks that arrive at a place (append, recall, reorder). Chunks that stay while
    others leave (slide, evict) follow ``on_leave``; under a minimum of "exact" they are prefilled again. No
    chunk arrives as a survivor, so for arrivals "survivor" is the same as "orbit".

    ``on_miss``: "sample" runs a few of the chunk's tokens behind its antecedents and estimates the others
    (guarantee "sampled"). "form" runs a forward behind the antecedents and stores its patch. "prefill" runs
    it and stores nothing. "blind" serves the canonical, moved only. A minimum of "sampled" also samples.

    ``share`` is the share of a chunk's tokens that a sample runs; "auto" takes the fewest tokens, but at
    least a quarter, that leave at most ``max_error`` of the chunk's variance unexplained. This is estimated
    from the chunk's own KV before anything runs (`kamera.ops.complete`). A sample that would leave more
    unexplained, or run more than half of the tokens, is refused, and the chunk is prefilled instead.

    ``forms`` says when KV is stored. "returning", the default: a chunk that leaves is archived later, and a
    patch is formed later for antecedents that come back. Other objects are formed only on request
    (`kamera.window.keep_orbit`, `kamera.window.Arrange`, ``kamera compile``). "always" is for orders that are
    known to recur: each new chunk is archived, and each forward behind antecedents leaves its patch, within
    the operation that ran it.

    ``rank`` and ``patch_bytes`` bound the patches that are formed: the number of directions per layer and
    channel, and the share of the chunk's KV bytes (`kamera.ops.budget`, docs/patches.md; None: no bound but
    the rank). Only ``layers`` are corrected (a list or ``"a:b"``; None: all). A stored patch of a smaller
    budget, or with fewer layers, is a miss.

    ``max_divergence`` lets a patch of *other* antecedents serve as "near": the largest share of chunks in
    which the two antecedent sets may differ (0.0 to 1.0; 1.0 takes any patch however stale). None, the
    default, serves none under any ``minimum``. Of several, the one whose set differs least serves.

    ``on_leave`` is the treatment of chunks that stay when others leave (slide, evict). "keep" serves them as
    survivors. "repair" gives each the KV it would have without what has left: by the patch stored for its
    remaining antecedents, else by a sample if the policy samples, else by one conditioned forward. "exact"
    prefills them.

    ``certified`` serves each guarantee below "exact" only on a backbone whose certificate found it safe
    (`kamera certify MODEL`). Without a certificate "patched" is served if the patch has proved itself
    (``tolerance``). The others are withheld, and `UncertifiedBackbone` warns once, with reasons. The default
    is `certified_by_default`.

    ``tolerance`` is the bound of a patch's proof, which it needs to be served as "patched" without a
    certificate. At every token of the proof's questions, the model's predictions behind the patched and
    behind the true KV may differ by at most so many nats. No decided token may change, and the KV itself must
    be within its bound at every token, layer and channel (`kamera.trust.Proof`, docs/proofs.md). A patch that
    fails is formed larger, up to eight times the budget. A patch that fails at every size is never served,
    and its chunk is prefilled instead. None: patches are not proved, so without a certificate none is served.

    ``audit`` is the share of served slots, and of their tokens, that later work prefills again and compares
    with what was served (`kamera.window.audit`); 0.0 audits none. An error beyond the guarantee's bound
    withholds the context: its chunks are prefilled again, and the next report names it.

    ``withheld`` are guarantees that are not served although ``minimum`` admits them. If "survivor" is
    withheld, chunks that stay are placed anew: by the patch stored for their remaining antecedents, or by a
    forward.

    Raises ValueError for an unknown value, or one out of range.
    """

    minimum: Guarantee = "patched"
    on_miss: OnMiss = "form"
    forms: Forms = "returning"
    rank: int = 32
    patch_bytes: float | None = 0.03
    layers: Sequence[int] | str | None = None
    share: float | Literal["auto"] = "auto"
    max_error: float = 0.07
    max_divergence: float | None = None
    on_leave: OnLeave = "keep"
    certified: bool = field(default_factory=certified_by_default)
    withheld: frozenset[Guarantee] = frozenset()
    tolerance: float | None = 0.05
    audit: float = 0.01

    @classmethod
    def exact(cls) -> ReusePolicy:
        """Serve only KV equal to a re-prefill: chunks whose antecedents change are prefilled."""
        return cls(minimum="exact", on_miss="prefill")

    @classmethod
    def from_report(cls, path: str | os.PathLike[str], *, max_kl: float) -> ReusePolicy:
        """The policy whose every guarantee lost at most ``max_kl`` nats in a report of `kamera certify`.

        The upper end of each 95 % interval counts (`CertifyReport.settings`). Nothing ties the policy to the
        model that was measured. Raises InvalidReport for a report that is missing or damaged, ValueError for
        a bound that is no positive number.
        """
        settings = CertifyReport.read(path).settings(max_kl)
        return cls(**{name: value for name, value in settings.items() if name in cls.__dataclass_fields__})

    @classmethod
    def balanced(cls) -> ReusePolicy:
        """Serve patches that proved themselves, and what a certificate found safe; repair other survivors."""
        return cls(certified=True)

    @classmethod
    def streaming(cls) -> ReusePolicy:
        """Serve patches and survivors without a certificate; survivors hold what they took from others."""
        return cls(certified=False)

    def __post_init__(self) -> None:
        kinds = {"minimum": Guarantee, "on_miss": OnMiss, "forms": Forms, "on_leave": OnLeave}
        for name, kind in kinds.items():
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name} {quote(value)} is none of {', '.join(get_args(kind))}")
        if self.minimum == "exact" and self.on_miss in ("blind", "sample"):
            raise ValueError(
                f'minimum "exact" with on_miss "{self.on_miss}" contradict: use on_miss "form" or "prefill"'
            )
        if self.share != "auto" and not (isinstance(self.share, int | float) and 0.0 < self.share <= MOST):
            raise ValueError(f'share {quote(self.share)} must lie above 0.0 and up to {MOST}, or be "auto"')
        if not 0.0 < self.max_error <= 1.0:
            raise ValueError(f"max_error {self.max_error} must lie above 0.0 and up to 1.0")
        object.__setattr__(self, "layers", layers_of(self.layers))
        object.__setattr__(self, "withheld", frozenset(self.withheld))
        for guarantee in sorted(self.withheld):
            if guarantee == "exact" or guarantee not in GUARANTEES:
                raise ValueError(f"withheld {quote(guarantee)} is none of {', '.join(GUARANTEES[1:])}")
        _ = self.budget  # raises for an invalid budget
        if self.tolerance is not None and not self.tolerance > 0.0:
            raise ValueError(f"tolerance {self.tolerance} must be above 0.0 nats, or None for no proof")
        if self.max_divergence is not None and not 0.0 <= self.max_divergence <= 1.0:
            raise ValueError(f"max_divergence {self.max_divergence} must lie between 0.0 and 1.0")
        if not 0.0 <= self.audit <= 1.0:
            raise ValueError(f"audit {self.audit} must lie between 0.0 and 1.0, as a share of served slots")

    def admits(self, *guarantees: Guarantee) -> bool:
        """True if an arriving chunk may be served with one of these guarantees."""
        return any(g not in self.withheld and at_least(g, self.minimum) for g in guarantees)

    @property
    def moves(self) -> bool:
        """True if a stored chunk may be served behind antecedents that it was never conditioned on."""
        return self.samples or self.admits("near", "blind")

    def keeps(self, guarantee: Guarantee) -> bool:
        """True if a chunk of this guarantee may stay in place: under "exact" no other may."""
        return guarantee == "exact" or (self.minimum != "exact" and guarantee not in self.withheld)

    def keeps_patch(self, proof: Proof | None) -> bool:
        """True if a chunk that a patch of this proof conditions may stay as it is."""
        return self.tolerance is None or (proof is not None and proof.holds_at(self.tolerance))

    def without(self, guarantees: Iterable[Guarantee]) -> ReusePolicy:
        """The same policy with these guarantees withheld too."""
        withheld = self.withheld.union(guarantees)
        on_miss = self.on_miss
        if on_miss == "blind" and "blind" in withheld:
            on_miss = "prefill"
        if on_miss == "sample" and "sampled" in withheld:
            on_miss = "form"
        return replace(self, withheld=withheld, on_miss=on_miss)

    @property
    def samples(self) -> bool:
        """True if a chunk may be served by running a few of its tokens."""
        asked = self.minimum == "sampled" or self.on_miss == "sample"
        return asked and "sampled" not in self.withheld

    def as_repairing(self) -> ReusePolicy:
        """The policy of a repair: a patch of exactly the chunks that remain, else a forward."""
        if self.minimum == "exact":
            return self
        orbit: set[Guarantee] = set() if self.admits("orbit") else {"orbit"}
        on_miss: OnMiss = "form" if self.on_miss == "blind" else self.on_miss
        on_miss = "sample" if self.samples else on_miss
        return replace(self._strictly("orbit", on_miss), withheld=self.withheld | orbit)

    @property
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
        """The policy on a backbone that may serve no KV below exact."""
        on_miss: OnMiss = "prefill" if self.on_miss in ("blind", "sample") else self.on_miss
        return replace(self, minimum="exact", on_miss=on_miss, tolerance=None)

    def to_info(self) -> dict[str, Any]:
        """Keyword arguments of JSON types, as stored in a saved window."""
        return asdict(self) | {"withheld": sorted(self.withheld)}


def policy_of(given: ReusePolicy | None, on_leave: OnLeave | None = None) -> ReusePolicy:
    """The policy given, else the default one, with ``on_leave`` if that is given. Raises ValueError."""
    check_policy(given)
    policy = given or ReusePolicy()
    return policy if on_leave is None else replace(policy, on_leave=on_leave)


def check_policy(given: object) -> None:
    """Raise ValueError for anything but a `ReusePolicy` or None: its name, say, or one that is not called."""
    if given is None or isinstance(given, ReusePolicy):
        return
    made = [f"ReusePolicy.{name}" for name in ("exact", "balanced", "streaming")]
    shown = getattr(given, "__qualname__", "")
    if given is ReusePolicy or shown in made:
        raise ValueError(f"policy {shown} is not called: give {shown}()")
    named = [name for name in made if isinstance(given, str) and name == f"ReusePolicy.{given.lower()}"]
    raise ValueError(
        f"policy {quote(given)} is no ReusePolicy: give {', '.join(f'{name}()' for name in named or made)}"
    )
