"""Upper confidence limits of shares: how large one may be, given how often something happened."""

from __future__ import annotations

import math

CONFIDENCE = 0.95
"""Share of all samples for which the limit lies above the true share."""

_STEPS = 60


def upper_limit(happened: int, of: int, confidence: float = CONFIDENCE) -> float:
    """The one-sided upper limit of Clopper and Pearson (1934) of a share that was seen ``happened`` times.

    The share under which so few would happen with a probability of 1 - ``confidence``; 1.0 for none ``of``
    nothing. Raises ValueError for impossible numbers.
    """
    if not 0 <= happened <= of or not 0.0 < confidence < 1.0:
        raise ValueError(f"{happened} of {of} at a confidence of {confidence} is no sample")
    if happened == of:
        return 1.0
    low, high = happened / of, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _at_most(happened, of, middle) > 1.0 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(happened: int, of: int, share: float) -> float:
    """Probability that something of this share happens at most so often (the binomial distribution)."""
    if share >= 1.0:
        return float(happened >= of)
    log = [
        math.lgamma(of + 1)
        - math.lgamma(k + 1)
        - math.lgamma(of - k + 1)
        + (k * math.log(share) if k else 0.0)
        + (of - k) * math.log1p(-share)
        for k in range(happened + 1)
    ]
    return math.fsum(map(math.exp, log))
