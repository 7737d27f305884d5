"""The policy under which a window places segments that came before."""

from __future__ import annotations

from dataclasses import replace

from kamera.trust import ReusePolicy


def strict(policy: ReusePolicy) -> ReusePolicy:
    """``policy`` without KV of other left contexts."""
    if policy.minimum == "exact":
        return policy
    minimum = "orbit" if policy.admits("near", "blind") else policy.minimum
    on_miss = "form" if policy.on_miss == "blind" else policy.on_miss
    return replace(policy, minimum=minimum, on_miss=on_miss, max_divergence=None)
