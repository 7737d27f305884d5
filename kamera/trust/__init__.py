"""Guarantees and policies: values, and decisions that run no model."""

from kamera.trust.guarantee import (
    GUARANTEES,
    LOSSY,
    AuditFinding,
    Guarantee,
    at_least,
    guarantee_named,
    lacking_bound,
    outranks,
    prefilled_behind,
    weakest,
)
from kamera.trust.policy import (
    ArchiveRule,
    OnLeave,
    OnMiss,
    ReusePolicy,
    check_policy,
    policy_of,
)
from kamera.trust.report import CertifyReport, Estimate, Losses

__all__ = [
    "GUARANTEES",
    "LOSSY",
    "ArchiveRule",
    "AuditFinding",
    "CertifyReport",
    "Estimate",
    "Guarantee",
    "Losses",
    "OnLeave",
    "OnMiss",
    "ReusePolicy",
    "at_least",
    "check_policy",
    "guarantee_named",
    "lacking_bound",
    "outranks",
    "policy_of",
    "prefilled_behind",
    "weakest",
]
