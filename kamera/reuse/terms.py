"""The policies under which a window places segments of different trust."""

from __future__ import annotations

from dataclasses import replace

from kamera.reuse.calibration import Calibration
from kamera.trust import GUARANTEES, ReusePolicy
from kamera.window import KameraWindow


def strict(policy: ReusePolicy, behind: bool = False) -> ReusePolicy:
    """``policy`` without KV of other left contexts; ``behind`` such KV a minimum of "exact" cannot hold."""
    if policy.minimum == "exact":
        if not behind:
            return policy
        return replace(policy, minimum="patched", withheld=frozenset(GUARANTEES[1:]), max_divergence=None)
    return replace(policy.without({"near", "blind"}), max_divergence=None)


def loose(policy: ReusePolicy) -> ReusePolicy:
    """The policy that offers stored KV of any left context, the longest equal one first."""
    allowed = frozenset(policy.withheld) - {"near", "blind"}
    return replace(
        policy,
        minimum="blind",
        on_miss="prefill",
        max_divergence=1.0,
        nearest="left",
        withheld=allowed,
    )


def serves_moved(window: KameraWindow, calibration: Calibration | None) -> bool:
    """True if a stored chunk may be served in ``window`` behind chunks that it was never conditioned on."""
    calibrated = calibration is not None and calibration.threshold is not None
    return strict(window.policy).moves or (calibrated and window.terms.asked.moves)
