"""The policy under which a window places segments that came before."""

from __future__ import annotations

from dataclasses import replace

from kamera.trust import ReusePolicy


def strict(policy: ReusePolicy) -> ReusePolicy:
    """``policy`` without KV of other left contexts."""
    if policy.minimum == "exact":
        return policy
    return replace(policy.without({"near", "blind"}), max_divergence=None)
