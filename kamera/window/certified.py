"""Finds a backbone's certificate, and warns of guarantees below exact that it does not permit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import platformdirs

from kamera.engines import Engine
from kamera.errors import CertificateMismatch, InvalidCertificate, UncertifiedBackbone
from kamera.ops import PatchBudget
from kamera.store import ChunkStore, certificate_folders
from kamera.trust import Certificate, Grounds, Permit, ReusePolicy, Terms, permit_of, terms_of

_old_warnings: set[str] = set()
"""Warnings that this process has given: any number of windows of one backbone give them once."""


def choose_terms(
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
        own = certificate if isinstance(certificate, Certificate) else Certificate.read(certificate)
        why = own.unusable(grounds_of(backbone, policy.budget))
        if why is not None:
            raise CertificateMismatch(
                f"the certificate of {own.model} does not serve here: {why}; run kamera certify again, or "
                "leave it out"
            )
        permit = Permit(own, "", own.unsafe)
    elif not policy.certified or policy.minimum == "exact":
        return Terms(policy, replace(policy, tolerance=None))
    else:
        permit = find_certificate(grounds_of(backbone, policy.budget), folders(store))
    terms = terms_of(policy, permit, backbone.facts.kind, _command(backbone, policy.budget))
    if terms.warning and terms.warning not in _old_warnings:
        _old_warnings.add(terms.warning)
        warnings.warn(terms.warning, UncertifiedBackbone, stacklevel=3)
    return terms


def find_certificate(grounds: Grounds, places: Iterable[Path]) -> Permit:
    """The best certificate in these directories (`permit_of`): of files named for the fingerprint."""
    places = list(places)
    paths = [path for place in places for path in sorted(place.glob(f"{grounds.fingerprint[:16]}-*.json"))]
    where = ", ".join(map(str, places)) or "any folder (this user has no home: set KAMERA_CERTIFICATES)"
    return permit_of(grounds, [(path.name, _read(path)) for path in paths], where)


def _read(path: Path) -> Certificate | InvalidCertificate:
    try:
        return Certificate.read(path)
    except InvalidCertificate as error:
        return error


def folders(store: ChunkStore | None = None) -> tuple[Path, ...]:
    """Directories to search for certificates: beside a store directory's objects, then `certificate_home`."""
    beside = () if store is None else certificate_folders(store)
    own = certificate_home()
    return beside if own is None else (*beside, own)


def certificate_home() -> Path | None:
    """The directory `kamera certify` writes to: ``KAMERA_CERTIFICATES``, else the user's data directory.

    None for a user without a home (a container's).
    """
    folder = os.environ.get("KAMERA_CERTIFICATES")
    if folder:
        return Path(folder)
    try:
        return platformdirs.user_data_path("kamera", appauthor=False) / "certificates"
    except RuntimeError:
        return None


def _command(backbone: Engine, budget: PatchBudget) -> str:
    facts = backbone.facts
    # the fingerprint includes the dtype; by default the command takes the checkpoint's
    command = f"kamera certify {facts.checkpoint or 'MODEL'} --dtype {facts.dtype}"
    command += "" if budget.rank == ReusePolicy.rank else f" --rank {budget.rank}"
    if budget.share != ReusePolicy.patch_bytes:
        command += f" --patch-bytes {budget.share or 0:g}"
    return command


def grounds_of(backbone: Engine, budget: PatchBudget) -> Grounds:
    """The grounds of a measurement of ``backbone`` with patches of ``budget``."""
    limits = backbone.limits
    ends = [end for end in (limits.trained, limits.below) if end is not None]
    last = min(ends) if ends else None
    return Grounds(
        backbone.fingerprint,
        backbone.facts.dtype,
        backbone.identity.vocabulary(),
        last,
        budget,
        library_versions(),
    )


def library_versions() -> dict[str, str]:
    """Versions of the libraries that affect an answer besides the backbone: kamera, torch, transformers."""
    from kamera import __version__

    return {"kamera": __version__} | {name: version(name) for name in ("torch", "transformers")}
