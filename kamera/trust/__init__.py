"""Guarantees, policies, certificates, proofs: values, and decisions that run no model."""

from kamera.trust.certificate import Certificate, Finding, Grounds, Verdict
from kamera.trust.guarantee import (
    FAR,
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
    certified_by_default,
    check_policy,
    policy_of,
)
from kamera.trust.proof import Proof, compare, kv_error
from kamera.trust.report import CertifyReport, Estimate, Losses
from kamera.trust.sketch import sketch
from kamera.trust.terms import Permit, Terms, permit_of, terms_of

__all__ = [
    "FAR",
    "GUARANTEES",
    "LOSSY",
    "ArchiveRule",
    "AuditFinding",
    "Certificate",
    "CertifyReport",
    "Estimate",
    "Finding",
    "Grounds",
    "Guarantee",
    "Losses",
    "OnLeave",
    "OnMiss",
    "Permit",
    "Proof",
    "ReusePolicy",
    "Terms",
    "Verdict",
    "at_least",
    "certified_by_default",
    "check_policy",
    "compare",
    "guarantee_named",
    "kv_error",
    "lacking_bound",
    "outranks",
    "permit_of",
    "policy_of",
    "prefilled_behind",
    "sketch",
    "terms_of",
    "weakest",
]
