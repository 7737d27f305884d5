"""Guarantees, policies, certificates, proofs: values, and decisions that run no model."""

from kamera.trust.certificate import Certificate, Estimate, Finding, Grounds, Verdict
from kamera.trust.guarantee import (
    GUARANTEES,
    Guarantee,
    at_least,
    guarantee_named,
    outranks,
    prefilled_behind,
    weakest,
)
from kamera.trust.measured import MeasuredFile
from kamera.trust.policy import (
    ArchiveRule,
    OnLeave,
    OnMiss,
    PositionRule,
    ReusePolicy,
    certified_by_default,
    check_policy,
    policy_of,
)
from kamera.trust.proof import Proof, compared, kv_error
from kamera.trust.sketch import sketch

__all__ = [
    "GUARANTEES",
    "ArchiveRule",
    "Certificate",
    "Estimate",
    "Finding",
    "Grounds",
    "Guarantee",
    "MeasuredFile",
    "OnLeave",
    "OnMiss",
    "PositionRule",
    "Proof",
    "ReusePolicy",
    "Verdict",
    "at_least",
    "certified_by_default",
    "check_policy",
    "compared",
    "guarantee_named",
    "kv_error",
    "outranks",
    "policy_of",
    "prefilled_behind",
    "sketch",
    "weakest",
]
