"""What a certificate permits of the policy that is asked for; guarantees that it does not are withheld."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kamera.errors import InvalidCertificate
from kamera.trust.certificate import Certificate, Grounds
from kamera.trust.guarantee import GUARANTEES, Guarantee
from kamera.trust.policy import ReusePolicy


@dataclass(frozen=True)
class Terms:
    """The policy asked of a window, the policy it serves, and the certificate that permits it.

    ``reasons`` gives the reason for each guarantee that was asked for and is withheld, ``warning`` is what a
    user is told of them ("": nothing).
    """

    asked: ReusePolicy
    served: ReusePolicy
    certificate: Certificate | None = None
    reasons: Mapping[Guarantee, str] = field(default_factory=dict)
    warning: str = ""

    @property
    def is_restricted(self) -> bool:
        """True if guarantees below exact were asked for and are withheld, or need a proof."""
        return bool(self.reasons) or self.served.tolerance is not None


@dataclass(frozen=True)
class Permit:
    """A certificate that is given or found in directories, or the reason for none in one line.

    ``denied`` are guarantees that it, or another certificate of the same backbone, found unsafe.
    """

    certificate: Certificate | None
    refusal: str
    denied: Mapping[Guarantee, str] = field(default_factory=dict)


def permit_of(
    grounds: Grounds, files: Sequence[tuple[str, Certificate | InvalidCertificate]], where: str
) -> Permit:
    """The certificate among ``files`` that permits the most, strong guarantees counting first.

    ``files`` are names with what was read of them, ``where`` names their directories. A guarantee that any
    certificate of these grounds found unsafe is denied, even if another probe found it safe.
    """
    matching: list[tuple[str, Certificate]] = []
    refusals: list[str] = []
    for name, read in files:
        if isinstance(read, InvalidCertificate):
            refusals.append(str(read))
        elif why := read.difference(grounds):
            refusals.append(f"{name}: {why}")
        else:
            matching.append((name, read))
    denied: dict[Guarantee, str] = {}
    for name, certificate in matching:
        for guarantee, why in certificate.unsafe.items():
            denied.setdefault(guarantee, f"{name}: {why}")
    # what each permits below exact, the strongest first
    permits = [[one.refusal(g) is None and g not in denied for g in GUARANTEES[1:]] for _, one in matching]
    best = max(range(len(matching)), key=permits.__getitem__, default=None)
    if best is not None and any(permits[best]):
        return Permit(matching[best][1], "", denied)
    refusals += [f"{name}: {one.unusable(grounds) or 'another found it unsafe'}" for name, one in matching]
    nothing = f"none of fingerprint {grounds.fingerprint[:12]} in {where}"
    return Permit(None, "; ".join(refusals) or nothing, denied)


def terms_of(policy: ReusePolicy, permit: Permit, kind: str, command: str) -> Terms:
    """The terms of a policy under a permit; the warning names the model's ``kind`` and the ``command`` that
    certifies it.
    """
    wanted = _wanted_guarantees(policy)
    reasons = {g: why for g in wanted if (why := _refusal(policy, permit, g))}
    proving = policy.tolerance is not None and "patched" in reasons and "patched" not in permit.denied
    if proving:
        del reasons["patched"]
    if wanted and len(reasons) == len(wanted):
        refusal = permit.refusal or "; ".join(reasons.values())
        warning = (
            f"no certificate lets {kind} serve reused KV: {refusal}. Every chunk is prefilled exactly, as "
            f"without Kamera. Run `{command}`, or pass ReusePolicy(certified=False)"
        )
        return Terms(policy, policy.as_exact(), None, reasons, warning)
    served = policy.without(reasons) if reasons else policy
    served = served if proving else replace(served, tolerance=None)
    if not reasons:
        return Terms(policy, served, permit.certificate)
    told = "; ".join(f"{guarantee} KV ({why})" for guarantee, why in reasons.items())
    by = "a proved patch" if proving else "a stored patch"
    instead = f"; survivors are repaired, by {by} or a forward" if "survivor" in reasons else ""
    who, verb = ("no", "permits") if permit.certificate is None else ("the", "withholds")
    warning = (
        f"{who} certificate of {kind} {verb} {told}{instead}. Serve it all the same with "
        f"ReusePolicy(certified=False), or ask again: `{command}`"
    )
    return Terms(policy, served, permit.certificate, reasons, warning)


def _wanted_guarantees(policy: ReusePolicy) -> tuple[Guarantee, ...]:
    """The guarantees below exact that a policy would serve."""
    asked = {g for g in GUARANTEES[1:] if policy.admits(g)}
    asked |= {"survivor"} if policy.keeps("survivor") else set()
    asked |= {"blind"} if policy.on_miss == "blind" else set()
    asked = asked | {"sampled"} if policy.samples else asked - {"sampled"}
    asked -= {"near"} if policy.max_divergence is None else set()
    return tuple(g for g in GUARANTEES if g in asked)


def _refusal(policy: ReusePolicy, permit: Permit, guarantee: Guarantee) -> str | None:
    """The reason not to serve a guarantee that is asked for; None if it is permitted."""
    certificate, limit = permit.certificate, policy.max_divergence
    if certificate is None:
        return permit.refusal
    if why := permit.denied.get(guarantee) or certificate.refusal(guarantee):
        return why
    if guarantee == "sampled" and policy.max_error > ReusePolicy.max_error:
        measured = ReusePolicy.max_error
        return f"it was measured up to an error of {measured:g}, the policy takes {policy.max_error:g}"
    if guarantee == "near" and limit is not None and limit > certificate.divergence:
        return f"it was measured up to a divergence of {certificate.divergence:g}, the policy takes {limit:g}"
    return None
