"""Certificates: what a multi-hop probe measured on a backbone, and whether it may serve reused KV."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from kamera.errors import InvalidCertificate, StoreError
from kamera.ops import PatchBudget

FORMAT = 2
Verdict = Literal["safe", "unsafe", "cannot tell"]


@dataclass(frozen=True)
class Estimate:
    """A share or mean with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Certificate:
    """The outcome of one probe of one backbone under one set of library versions.

    ``model`` is a name for people; what counts is ``fingerprint``. ``n`` questions were asked, whose
    answers a guess hits with probability ``chance``; patches were bounded by ``rank`` and ``patch_bytes``
    as a policy's are. ``reprefill``, ``blind`` and ``patched`` are
    accuracies; ``eta`` and ``flip_recover`` are None when blind reuse lost nothing that could be
    won back. ``reason`` says in one line what the verdict rests on; ``created`` is UTC, ISO 8601.
    """

    fingerprint: str
    model: str
    versions: dict[str, str]
    rank: int
    patch_bytes: float | None
    probe: str
    probe_digest: str
    n: int
    chance: float
    reprefill: Estimate
    blind: Estimate
    patched: Estimate
    eta: Estimate | None
    flip_recover: Estimate | None
    verdict: Verdict
    reason: str
    created: str

    def difference(self, fingerprint: str, budget: PatchBudget) -> str | None:
        """What here is not as it was measured, in one line; None when all is."""
        if self.fingerprint != fingerprint:
            return (
                f"it is for backbone {self.fingerprint[:12]}, this is {fingerprint[:12]}: weights, adapters, "
                "dtype, rotary or processor settings differ"
            )
        running = library_versions()
        for name in running | self.versions:
            then, now = self.versions.get(name), running.get(name)
            if then != now:
                return f"it was measured with {name} {then}, this is {name} {now}"
        if self.rank != budget.rank:
            return f"it was measured with patches of rank {self.rank}, the policy's rank is {budget.rank}"
        if self.patch_bytes != budget.share:
            return f"it was measured with patch_bytes {self.patch_bytes}, the policy's is {budget.share}"
        if budget.layers is not None:
            return "it was measured with patches of all layers, the policy corrects some of them only"
        return None

    def refusal(self, fingerprint: str, budget: PatchBudget) -> str | None:
        """Why it does not let a backbone serve patches of ``budget`` here, in one line; None if it does."""
        why = self.difference(fingerprint, budget)
        if why is None and self.verdict != "safe":
            return f'its verdict is "{self.verdict}": {self.reason}'
        return why

    def matches(self, fingerprint: str, budget: PatchBudget) -> bool:
        """Whether it lets this backbone serve patches of this budget under the libraries that run now."""
        return self.refusal(fingerprint, budget) is None

    @property
    def file_name(self) -> str:
        """Its name in a directory: one probe of one backbone at one budget replaces its last run."""
        bytes_too = "" if self.patch_bytes is None else f"-bytes{self.patch_bytes:g}"
        return f"{self.fingerprint[:16]}-rank{self.rank}{bytes_too}-{self.probe}.json"

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write it into a directory (made if need be), atomically; returns the file.

        Raises StoreError when the operating system refuses.
        """
        content = asdict(self)
        document = {"format": FORMAT, "sha256": _digest(content), "certificate": content}
        path = Path(folder) / self.file_name
        aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(aside, path)
        except OSError as error:
            raise StoreError(f"the certificate cannot be written to {str(folder)!r}: {error}") from None
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a certificate file. Raises InvalidCertificate when it is damaged or was edited.

        The digest tells damage and edits by hand from what `write` wrote. It is no signature: whoever
        may write to the directory may certify.
        """
        where = repr(str(path))
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            form, seal, content = document["format"], document["sha256"], document["certificate"]
        except FileNotFoundError:
            raise InvalidCertificate(
                f"no certificate at {where}: run kamera certify MODEL --output DIR"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidCertificate(
                f"{where} is no certificate ({type(error).__name__}: {error}): run kamera certify again"
            ) from None
        if form != FORMAT:
            raise InvalidCertificate(
                f"{where} is of certificate format {form!r}, this version reads {FORMAT}: "
                "run kamera certify again"
            )
        if seal != _digest(content):
            raise InvalidCertificate(
                f"{where} was changed after it was written: its digest does not match; "
                "run kamera certify again"
            )
        try:
            return _built(content)
        except (TypeError, ValueError) as error:
            raise InvalidCertificate(
                f"{where} is no certificate: {error}; run kamera certify again"
            ) from None


def library_versions() -> dict[str, str]:
    """Versions of what decides an answer besides the backbone: kamera, torch, transformers."""
    from kamera import __version__

    return {"kamera": __version__} | {name: version(name) for name in ("torch", "transformers")}


def _digest(content: Any) -> str:
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()


def _built(content: Any) -> Certificate:
    names = {f.name for f in fields(Certificate)}
    if not isinstance(content, dict) or set(content) != names:
        raise ValueError(f"its fields are not {', '.join(sorted(names))}")
    if content["verdict"] not in get_args(Verdict):
        raise ValueError(f"verdict {content['verdict']!r} is none of {', '.join(get_args(Verdict))}")
    estimates = ("reprefill", "blind", "patched", "eta", "flip_recover")
    read = {name: None if content[name] is None else Estimate(**content[name]) for name in estimates}
    return Certificate(**{**content, **read})
