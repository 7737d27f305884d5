"""Finds a backbone's certificate; guarantees below exact that it does not permit are withheld."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import platformdirs

from kamera.engines import Engine
from kamera.errors import CertificateMismatch, InvalidCertificate, UncertifiedBackbone
from kamera.ops import PatchBudget
from kamera.store import ChunkStore, certificate_folders
from kamera.trust import GUARANTEES, Certificate, Grounds, Guarantee, ReusePolicy

_said: set[str] = set()
"""Warnings that this process has given: any number of windows of one backbone give them once."""


@dataclass(frozen=True)
class Terms:
    """The policy asked of a window, the policy it serves, and the certificate that permits it.

    ``reasons`` gives the reason for each guarantee that was asked for and is withheld.
    """

    asked: ReusePolicy
    served: ReusePolicy
    certificate: Certificate | None = None
    reasons: Mapping[Guarantee, str] = field(default_factory=dict)

    @property
    def withheld(self) -> bool:
        """True if guarantees below exact were asked for and are withheld, or need a proof."""
        return bool(self.reasons) or self.served.tolerance is not None


@dataclass(frozen=True)
class Permit:
    """The result of a search of directories: a certificate, or the reason for none in one line.

    ``denied`` are guarantees that another certificate, of the same backbone, found unsafe.
    """

    certificate: Certificate | None
    refusal: str
    denied: Mapping[Guarantee, str] = field(default_factory=dict)


def agree(
    backbone: Engine,
    store: ChunkStore,
    policy: ReusePolicy,
    certificate: Certificate | str | os.PathLike[str] | None,
) -> Terms:
    """The terms of a new window. Searches for no other certificate if ``certificate`` is given.

    Raises CertificateMismatch or InvalidCertificate for a given certificate that permits nothing here; warns
    `UncertifiedBackbone`, once per process and reason, of guarantees that are asked for and withheld.
    """
    if certificate is not None:
        held = certificate if isinstance(certificate, Certificate) else Certificate.read(certificate)
        why = held.difference(grounds_of(backbone, policy.budget)) or _nothing(held)
        if why is not None:
            raise CertificateMismatch(
                f"the certificate of {held.model} does not serve here: {why}; run kamera certify again, or "
                "leave it out"
            )
        return _terms(backbone, policy, Permit(held, ""))
    if not policy.certified or policy.minimum == "exact":
        return Terms(policy, replace(policy, tolerance=None))
    found = find_certificate(grounds_of(backbone, policy.budget), folders(store))
    return _terms(backbone, policy, found)


def find_certificate(grounds: Grounds, places: Iterable[Path]) -> Permit:
    """The certificate in these directories that permits the most, strong guarantees counting first.

    Only files named for the fingerprint are read. A guarantee that any certificate of this backbone, under
    these versions and at this budget, found unsafe is denied, even if another probe found it safe.
    """
    matching: list[tuple[Path, Certificate]] = []
    refusals: list[str] = []
    places = list(places)
    for path in (p for place in places for p in sorted(place.glob(f"{grounds.fingerprint[:16]}-*.json"))):
        try:
            held = Certificate.read(path)
        except InvalidCertificate as error:
            refusals.append(str(error))
            continue
        why = held.difference(grounds)
        if why is None:
            matching.append((path, held))
        else:
            refusals.append(f"{path.name}: {why}")
    denied: dict[Guarantee, str] = {}
    for path, held in matching:
        for guarantee, finding in held.findings.items():
            if finding.verdict == "unsafe":
                denied.setdefault(guarantee, f"{path.name}: {held.refusal(guarantee)}")
    best = max((held for _, held in matching), key=lambda held: _serves(held, denied), default=None)
    if best is not None and any(_serves(best, denied)):
        return Permit(best, "", denied)
    refusals += [f"{path.name}: {_nothing(held) or 'another found it unsafe'}" for path, held in matching]
    where = ", ".join(map(str, places)) or "any folder (this user has no home: set KAMERA_CERTIFICATES)"
    nothing = f"none of fingerprint {grounds.fingerprint[:12]} in {where}"
    return Permit(None, "; ".join(refusals) or nothing, denied)


def folders(store: ChunkStore | None = None) -> tuple[Path, ...]:
    """Directories to search for certificates: beside the objects of a store directory, then `home`."""
    beside = () if store is None else certificate_folders(store)
    own = home()
    return beside if own is None else (*beside, own)


def home() -> Path | None:
    """The directory `kamera certify` writes to: ``KAMERA_CERTIFICATES``, else the user's data directory.

    None for a user without a home (a container's).
    """
    said = os.environ.get("KAMERA_CERTIFICATES")
    if said:
        return Path(said)
    try:
        return platformdirs.user_data_path("kamera", appauthor=False) / "certificates"
    except RuntimeError:
        return None


def _serves(held: Certificate, denied: Mapping[Guarantee, str]) -> list[bool]:
    """True for each guarantee below exact that is permitted, the strongest first."""
    return [held.refusal(guarantee) is None and guarantee not in denied for guarantee in GUARANTEES[1:]]


def _nothing(held: Certificate) -> str | None:
    """The reason if a certificate permits nothing at all, else None."""
    return None if held.safe else held.refusal("patched")


def _terms(backbone: Engine, policy: ReusePolicy, found: Permit) -> Terms:
    """The terms of a policy under the certificate that was found, or under none."""
    held, wanted = found.certificate, _wanted(policy)
    command = _command(backbone, policy.budget)
    reasons: dict[Guarantee, str] = {}
    for guarantee in wanted:
        why: str | None = found.refusal
        if held is not None:
            why = found.denied.get(guarantee) or held.refusal(guarantee) or _too_far(policy, held, guarantee)
        if why:
            reasons[guarantee] = why
    proving = policy.tolerance is not None and "patched" in reasons and not _unsafe(found, "patched")
    if proving:
        del reasons["patched"]
    if wanted and len(reasons) == len(wanted):
        refusal = found.refusal or "; ".join(reasons.values())
        _say(
            f"no certificate lets {backbone.named.kind} serve reused KV: {refusal}. Every chunk is prefilled "
            f"exactly, as without Kamera. Run `{command}`, or pass ReusePolicy(certified=False)"
        )
        return Terms(policy, policy.as_exact(), None, reasons)
    if reasons:
        told = "; ".join(f"{guarantee} KV ({why})" for guarantee, why in reasons.items())
        by = "a proved patch" if proving else "a stored patch"
        instead = f"; survivors are repaired, by {by} or a forward" if "survivor" in reasons else ""
        who = "the certificate of" if held is not None else "no certificate of"
        verb = "withholds" if held is not None else "permits"
        _say(
            f"{who} {backbone.named.kind} {verb} {told}{instead}. Serve it all the same with "
            f"ReusePolicy(certified=False), or ask again: `{command}`"
        )
    served = policy.without(reasons) if reasons else policy
    return Terms(policy, served if proving else replace(served, tolerance=None), held, reasons)


def _unsafe(found: Permit, guarantee: Guarantee) -> bool:
    """True if a certificate of this backbone found the guarantee unsafe, not merely untested."""
    held = {} if found.certificate is None else found.certificate.findings
    return guarantee in found.denied or (guarantee in held and held[guarantee].verdict == "unsafe")


def _wanted(policy: ReusePolicy) -> tuple[Guarantee, ...]:
    """The guarantees below exact that a policy would serve."""
    asked = {g for g in GUARANTEES[1:] if policy.admits(g)}
    asked |= {"survivor"} if policy.keeps("survivor") else set()
    asked |= {"blind"} if policy.on_miss == "blind" else set()
    asked = asked | {"sampled"} if policy.samples else asked - {"sampled"}
    asked -= {"near"} if policy.max_divergence is None else set()
    return tuple(g for g in GUARANTEES if g in asked)


def _too_far(policy: ReusePolicy, held: Certificate, guarantee: Guarantee) -> str | None:
    if guarantee == "sampled" and policy.max_error > ReusePolicy.max_error:
        measured = ReusePolicy.max_error
        return f"it was measured up to an error of {measured:g}, the policy takes {policy.max_error:g}"
    limit = policy.max_divergence
    if guarantee == "near" and limit is not None and limit > held.divergence:
        return f"it was measured up to a divergence of {held.divergence:g}, the policy takes {limit:g}"
    return None


def _command(backbone: Engine, budget: PatchBudget) -> str:
    named = backbone.named
    # the fingerprint includes the dtype; by default the command takes the checkpoint's
    command = f"kamera certify {named.checkpoint or 'MODEL'} --dtype {named.dtype}"
    command += "" if budget.rank == ReusePolicy.rank else f" --rank {budget.rank}"
    if budget.share != ReusePolicy.patch_bytes:
        command += f" --patch-bytes {budget.share or 0:g}"
    return command


def _say(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, UncertifiedBackbone, stacklevel=5)


def grounds_of(backbone: Engine, budget: PatchBudget) -> Grounds:
    """The grounds of a measurement of ``backbone`` with patches of ``budget``."""
    limits = backbone.limits
    ends = [end for end in (limits.trained, limits.below) if end is not None]
    last = min(ends) if ends else None
    return Grounds(
        backbone.fingerprint,
        backbone.named.dtype,
        backbone.vocabulary,
        last,
        budget,
        library_versions(),
    )


def library_versions() -> dict[str, str]:
    """Versions of the libraries that affect an answer besides the backbone: kamera, torch, transformers."""
    from kamera import __version__

    return {"kamera": __version__} | {name: version(name) for name in ("torch", "transformers")}
