"""May this backbone serve less than exact KV here? Find its certificate, or say once that there is none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kamera.engines import Engine
from kamera.errors import CertificateMismatch, InvalidCertificate, UncertifiedBackbone
from kamera.ops import PatchBudget
from kamera.store import ChunkStore, certificate_folders
from kamera.window.certificate import Certificate
from kamera.window.policy import ReusePolicy

_said: set[str] = set()
"""Warnings this process has given: a thousand windows of one backbone say it once."""


@dataclass(frozen=True)
class Terms:
    """What a window was asked to serve, what it serves, and the certificate that lets it."""

    asked: ReusePolicy
    served: ReusePolicy
    certificate: Certificate | None = None

    @property
    def withheld(self) -> bool:
        """Whether approximate guarantees were asked for and are not served."""
        return self.asked != self.served


@dataclass(frozen=True)
class Search:
    """A look through directories: the certificate found, or one line on why there is none."""

    certificate: Certificate | None
    refusal: str


def agree(
    backbone: Engine,
    store: ChunkStore,
    policy: ReusePolicy | None,
    certificate: Certificate | str | os.PathLike[str] | None,
) -> Terms:
    """The terms of a new window. Looks no further than ``certificate`` when one is given.

    Raises CertificateMismatch or InvalidCertificate for a given certificate that does not serve here;
    warns `UncertifiedBackbone`, once per process and reason, when none is found and one is needed.
    """
    policy = policy or ReusePolicy()
    if certificate is not None:
        held = certificate if isinstance(certificate, Certificate) else Certificate.read(certificate)
        why = held.refusal(backbone.fingerprint, policy.budget)
        if why is not None:
            raise CertificateMismatch(
                f"the certificate of {held.model} does not serve here: {why}; run kamera certify again, or "
                "leave it out"
            )
        return Terms(policy, policy, held)
    if not policy.certified or policy.minimum == "exact":
        return Terms(policy, policy)
    found = find_certificate(backbone.fingerprint, policy.budget, folders(store))
    if found.certificate is not None:
        return Terms(policy, policy, found.certificate)
    _say(backbone, policy.budget, found.refusal)
    return Terms(policy, policy.exactly())


def find_certificate(fingerprint: str, budget: PatchBudget, places: Iterable[Path]) -> Search:
    """The certificate in these directories that lets a backbone serve patches of ``budget``.

    Only files named for the fingerprint are read. An "unsafe" verdict on this backbone, under these
    versions and at this budget outweighs a "safe" one of another probe.
    """
    safe: Certificate | None = None
    refusals: list[str] = []
    places = list(places)
    for path in (p for place in places for p in sorted(place.glob(f"{fingerprint[:16]}-*.json"))):
        try:
            held = Certificate.read(path)
        except InvalidCertificate as error:
            refusals.append(str(error))
            continue
        why = held.refusal(fingerprint, budget)
        if why is None:
            safe = safe or held
        elif held.verdict == "unsafe" and held.difference(fingerprint, budget) is None:
            return Search(None, f"{path.name}: {why}")
        else:
            refusals.append(f"{path.name}: {why}")
    if safe is not None:
        return Search(safe, "")
    where = ", ".join(map(str, places)) or "any folder (this user has no home: set KAMERA_CERTIFICATES)"
    nothing = f"none of fingerprint {fingerprint[:12]} in {where}"
    return Search(None, "; ".join(refusals) or nothing)


def folders(store: ChunkStore | None = None) -> tuple[Path, ...]:
    """Where certificates are looked for: beside the objects of a store directory, then `home`."""
    beside = () if store is None else certificate_folders(store)
    own = home()
    return beside if own is None else (*beside, own)


def home() -> Path | None:
    """Where `kamera certify` writes: ``KAMERA_CERTIFICATES``, else the user's data directory.

    None for a user without a home (a container's).
    """
    said = os.environ.get("KAMERA_CERTIFICATES")
    if said:
        return Path(said)
    try:
        return platformdirs.user_data_path("kamera", appauthor=False) / "certificates"
    except RuntimeError:
        return None


def _say(backbone: Engine, budget: PatchBudget, refusal: str) -> None:
    named = backbone.named
    # the fingerprint binds the dtype, and the command would take the checkpoint's by itself
    command = f"kamera certify {named.checkpoint or 'MODEL'} --dtype {named.dtype}"
    command += "" if budget.rank == ReusePolicy.rank else f" --rank {budget.rank}"
    if budget.share != ReusePolicy.patch_bytes:
        command += f" --patch-bytes {budget.share or 0:g}"
    message = (
        f"no certificate lets {named.kind} serve reused KV: {refusal}. Every chunk is "
        f"prefilled exactly, as without Kamera. Run `{command}`, or pass ReusePolicy(certified=False)"
    )
    if message not in _said:
        _said.add(message)
        warnings.warn(message, UncertifiedBackbone, stacklevel=4)
