"""Certificates: a probe's measurements of a backbone, and the KV below exact that it may serve."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kamera.errors import quote
from kamera.ops import PatchBudget
from kamera.trust.guarantee import GUARANTEES, Guarantee
from kamera.trust.measured import MeasuredFile

FILE = MeasuredFile("certificate", 2, "run kamera certify MODEL --output DIR")
Verdict = Literal["safe", "unsafe", "cannot tell"]
"""What a probe finds of a guarantee."""


@dataclass(frozen=True)
class Estimate:
    """A share or mean with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Finding:
    """The measured quality of one way of serving KV.

    ``n`` questions were asked; a guess is right with probability ``chance``. ``reprefill``, ``blind`` and
    ``served`` are accuracies; ``eta`` and ``flip_recover`` are None if blind reuse lost nothing that could be
    won back. ``closed`` is, by channel and layer, the served share of what a patch of its size restores of
    the KV that blind reuse lacks, the least of all chunks (None: not measured). ``reason`` gives
    the grounds of the verdict in one line.
    """

    verdict: Verdict
    reason: str
    n: int
    chance: float
    reprefill: Estimate
    blind: Estimate
    served: Estimate
    eta: Estimate | None
    flip_recover: Estimate | None
    closed: dict[str, list[float]] | None = None


@dataclass(frozen=True)
class Grounds:
    """The scope of a measurement: a backbone, the patches of a policy, and the versions of the libraries.

    ``vocabulary`` is a digest of the tokenizer's vocabulary ("" without a tokenizer), ``position_limit`` the
    first position that the model lacks or at which it rotates keys in another way (None: no such position).
    """

    fingerprint: str
    dtype: str
    vocabulary: str
    position_limit: int | None
    budget: PatchBudget
    versions: dict[str, str]


@dataclass(frozen=True)
class Certificate:
    """The outcome of one probe on one set of `Grounds`.

    ``model`` is a name for people; a certificate is bound by its grounds, whose fields it lists.
    ``findings`` are by guarantee; a guarantee without one was not tested. ``sabotages`` are
    deliberately wrong operators by their defect, and what the KV that they show differs by ("" if nothing
    tells it from a sound one's). ``divergence`` is
    that of the antecedents that "near" was tested behind. ``created`` is UTC, ISO 8601.
    """

    fingerprint: str
    model: str
    dtype: str
    vocabulary: str
    position_limit: int | None
    versions: dict[str, str]
    rank: int
    patch_bytes: float | None
    probe: str
    probe_digest: str
    divergence: float
    findings: dict[Guarantee, Finding]
    sabotages: dict[str, str]
    created: str

    def difference(self, grounds: Grounds) -> str | None:
        """The first difference from the measured grounds, in one line; None if none."""
        budget = grounds.budget
        if self.dtype != grounds.dtype:
            return f"it was measured in {self.dtype}, this model is in {grounds.dtype}"
        if self.vocabulary != grounds.vocabulary:
            return (
                f"it was measured with vocabulary {self.vocabulary[:12] or 'none'}, this tokenizer's is "
                f"{grounds.vocabulary[:12] or 'none'}"
            )
        if self.position_limit != grounds.position_limit:
            return (
                f"it was measured with positions up to {self.position_limit}, this model's end at "
                f"{grounds.position_limit}"
            )
        if self.fingerprint != grounds.fingerprint:
            return (
                f"it is for backbone {self.fingerprint[:12]}, this is {grounds.fingerprint[:12]}: weights, "
                "adapters, module, rotary or processor settings differ"
            )
        for name in grounds.versions | self.versions:
            then, now = self.versions.get(name), grounds.versions.get(name)
            if then != now:
                return f"it was measured with {name} {then}, this is {name} {now}"
        if self.rank != budget.rank:
            return f"it was measured with patches of rank {self.rank}, the policy's rank is {budget.rank}"
        if self.patch_bytes != budget.share:
            return f"it was measured with patch_bytes {self.patch_bytes}, the policy's is {budget.share}"
        if budget.layers is not None:
            return "it was measured with patches of all layers, the policy corrects some of them only"
        return None

    @property
    def safe(self) -> tuple[Guarantee, ...]:
        """The guarantees found safe, from the strongest to the weakest."""
        return tuple(g for g in GUARANTEES if g in self.findings and self.findings[g].verdict == "safe")

    def refusal(self, guarantee: Guarantee) -> str | None:
        """The reason not to serve KV of this guarantee, in one line; None if it may be served."""
        found = self.findings.get(guarantee)
        if found is None:
            return f'its probe did not ask about "{guarantee}"'
        if found.verdict != "safe":
            return f'its verdict on "{guarantee}" is "{found.verdict}": {found.reason}'
        return None

    @property
    def file_name(self) -> str:
        """File name in a directory: a new run of one probe on one backbone and budget replaces the last."""
        bytes_too = "" if self.patch_bytes is None else f"-bytes{self.patch_bytes:g}"
        return f"{self.fingerprint[:16]}-rank{self.rank}{bytes_too}-{self.probe}.json"

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write it into a directory (created if missing), atomically; returns the file.

        Raises StoreError if the operating system refuses.
        """
        return FILE.write(Path(folder) / self.file_name, asdict(self))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a certificate file. Raises InvalidCertificate if it is damaged or was edited."""
        content = FILE.read(path)
        try:
            return _built(content)
        except (AttributeError, TypeError, ValueError) as error:
            raise FILE.invalid(repr(str(path)), str(error)) from None


def _built(content: Any) -> Certificate:
    found = dict(_exactly(Certificate, content))
    found["findings"] = {name: _finding(finding) for name, finding in found["findings"].items()}
    for guarantee in found["findings"]:
        if guarantee not in GUARANTEES:
            raise ValueError(f"finding {quote(guarantee)} is about none of {', '.join(GUARANTEES)}")
    return Certificate(**found)


def _finding(content: Any) -> Finding:
    found = dict(_exactly(Finding, content))
    if found["verdict"] not in get_args(Verdict):
        raise ValueError(f"verdict {found['verdict']!r} is none of {', '.join(get_args(Verdict))}")
    for name in ("reprefill", "blind", "served", "eta", "flip_recover"):
        found[name] = None if found[name] is None else Estimate(**found[name])
    return Finding(**found)


def _exactly(cls: type, content: Any) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    if not isinstance(content, dict) or set(content) != names:
        raise ValueError(f"its fields are not {', '.join(sorted(names))}")
    return content
