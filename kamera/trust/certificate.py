"""Certificates: a probe's measurements of a backbone, and the KV below exact that it may serve."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import cattrs

from kamera.errors import InvalidCertificate, StoreError
from kamera.files import publish_file
from kamera.ops import PatchBudget
from kamera.trust.guarantee import GUARANTEES, Guarantee
from kamera.trust.report import Estimate

FORMAT, _REMEDY = 2, "run kamera certify MODEL --output DIR"
_CONVERTER = cattrs.Converter(forbid_extra_keys=True)

Verdict = Literal["safe", "unsafe", "cannot tell"]
"""What a probe finds of a guarantee."""


@dataclass(frozen=True)
class Finding:
    """The measured quality of one way of serving KV.

    ``n`` questions were asked; a guess is right with probability ``chance``. ``reprefill``, ``blind`` and
    ``served`` are accuracies; ``eta`` and ``flip_recover`` are None if blind reuse lost nothing that could be
    won back. ``reason`` gives the grounds of the verdict in one line.
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

    ``model`` is a name for people; a certificate is bound to its ``grounds``. ``findings`` has one entry for
    each tested guarantee. ``sabotages`` are findings on deliberately wrong operators, by their defect: they
    show which errors the probe detects. ``divergence`` is that of the antecedents with which "near" was
    tested. ``created`` is UTC, ISO 8601.
    """

    model: str
    grounds: Grounds
    probe: str
    probe_digest: str
    divergence: float
    findings: dict[Guarantee, Finding]
    sabotages: dict[str, Finding]
    created: str

    def difference(self, grounds: Grounds) -> str | None:
        """The first difference from the measured grounds, in one line; None if none."""
        ours, was, wanted = self.grounds, self.grounds.budget, grounds.budget
        settings = "this one has other weights, adapters, module, rotary or processor settings:"
        both = grounds.versions | ours.versions
        pairs: list[tuple[str, object, str, object]] = [
            ("in", ours.dtype, "this model is in", grounds.dtype),
            ("with vocabulary", ours.vocabulary, "this tokenizer's is", grounds.vocabulary),
            ("with positions up to", ours.position_limit, "this model's end at", grounds.position_limit),
            ("on backbone", ours.fingerprint, settings, grounds.fingerprint),
            *((f"with {n}", ours.versions.get(n), f"this is {n}", grounds.versions.get(n)) for n in both),
            ("with patches of rank", was.rank, "the policy's rank is", wanted.rank),
            ("with patch_bytes", was.share, "the policy's is", wanted.share),
            ("with patches of", _layers(was), "the policy corrects", _layers(wanted)),
        ]
        for measured, then, here, now in pairs:
            if then != now:
                return f"it was measured {measured} {_short(then)}, {here} {_short(now)}"
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
    def unsafe(self) -> dict[Guarantee, str]:
        """The guarantees found unsafe, each with its `refusal`."""
        return {g: str(self.refusal(g)) for g, found in self.findings.items() if found.verdict == "unsafe"}

    def unusable(self, grounds: Grounds) -> str | None:
        """The reason why it permits nothing on these grounds, in one line; None if it permits anything."""
        return self.difference(grounds) or (None if self.safe else self.refusal("patched"))

    @property
    def file_name(self) -> str:
        """File name in a directory: a new run of one probe on one backbone and budget replaces the last."""
        budget = self.grounds.budget
        bytes_too = "" if budget.share is None else f"-bytes{budget.share:g}"
        return f"{self.grounds.fingerprint[:16]}-rank{budget.rank}{bytes_too}-{self.probe}.json"

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write it into a directory (created if missing), atomically; returns the file.

        Raises StoreError if the operating system refuses.
        """
        path, content = Path(folder) / self.file_name, asdict(self)
        document = {"format": FORMAT, "sha256": _digest(content), "certificate": content}
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with publish_file(path, 0o666) as file:
                file.write(text.encode())
        except OSError as error:
            raise StoreError(f"the certificate cannot be written to {str(path.parent)!r}: {error}") from None
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a certificate file.

        Raises InvalidCertificate for a missing file, another format, damage or an edit. The digest is no
        signature: anyone who may write to the directory may make one.
        """
        where = repr(str(path))
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            form, seal, content = document["format"], document["sha256"], document["certificate"]
            if form != FORMAT:
                why = f"{where} is of certificate format {form!r}, this version reads {FORMAT}"
            elif seal != _digest(content):
                why = f"{where} was changed after it was written: its digest does not match"
            else:
                return _CONVERTER.structure(content, cls)
        except FileNotFoundError:
            why = f"no certificate at {where}"
        except cattrs.BaseValidationError as error:
            why = f"{where} is no certificate ({'; '.join(cattrs.transform_error(error))})"
        except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
            why = f"{where} is no certificate ({type(error).__name__}: {error})"
        raise InvalidCertificate(f"{why}: {_REMEDY}")


def _digest(content: Any) -> str:
    # as JSON gives it back, so that what is written and what is read have one digest
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()


def _short(value: object) -> object:
    """A digest by its first digits."""
    text = str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text or "none"


def _layers(budget: PatchBudget) -> str:
    return "all layers" if budget.layers is None else f"layers {', '.join(map(str, budget.layers))}"


def _check_type(value: Any, kind: type) -> Any:
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"{value!r} is no {kind.__name__}")


for _kind in (str, int, float):  # cattrs itself takes "12" for 12
    _CONVERTER.register_structure_hook(_kind, _check_type)
