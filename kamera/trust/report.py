"""What `kamera certify` measured: the losses of each guarantee on one backbone, and the policy they allow."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cattrs

from kamera.errors import InvalidReport, StoreError
from kamera.files import publish_file
from kamera.trust.guarantee import Guarantee

FORMAT, _REMEDY = 1, "run kamera certify MODEL again"
_CONVERTER = cattrs.Converter(forbid_extra_keys=True)


@dataclass(frozen=True)
class Estimate:
    """A share or mean with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Losses:
    """What one way of serving the same window loses against its re-prefill.

    ``kl`` is KL(served ‖ re-prefill) of next-token distributions in nats, ``flips`` the share of tokens
    whose likeliest successor is another one; both are means over ``documents``, with ``tokens`` of answers.
    ``kv`` is the relative error (L2) of the served KV, a root mean square over layers and channels.
    ``alike`` are the tokens of an answer before the first other one, all if there is none (None: an older
    report). ``eta`` is 1 − KL / KL of blind reuse (None: blind reuse lost nothing). Intervals are bootstraps
    over documents. ``departed`` is the share of what the served KV was computed behind that is not in view:
    of survivors by tokens, of "near" by chunks (`ReusePolicy.max_divergence`), else None.
    """

    guarantee: Guarantee
    departed: float | None
    documents: int
    tokens: int
    kl: Estimate
    eta: Estimate | None
    flips: Estimate
    kv: Estimate
    alike: Estimate | None = None


@dataclass(frozen=True)
class CertifyReport:
    """The losses of each guarantee on one backbone.

    ``model`` is a name for people; ``fingerprint`` and ``dtype`` say what was measured, with patches of at
    most ``rank`` directions and ``patch_bytes`` of the KV's bytes (None: as the rank takes). ``material``
    names what was read, ``created`` is UTC, ISO 8601.
    """

    model: str
    fingerprint: str
    dtype: str
    rank: int
    patch_bytes: float | None
    versions: dict[str, str]
    material: str
    created: str
    rows: tuple[Losses, ...]

    def of(self, guarantee: Guarantee) -> tuple[Losses, ...]:
        """The rows of one guarantee, by what has departed."""
        found = (row for row in self.rows if row.guarantee == guarantee)
        return tuple(sorted(found, key=lambda row: row.departed or 0.0))

    def settings(self, max_kl: float) -> dict[str, Any]:
        """Fields of the `ReusePolicy` whose every guarantee lost at most ``max_kl`` nats, interval included.

        ``minimum`` is the weakest guarantee with nothing between it and "exact" that lost more, or that was
        not measured ("near" aside: it is served only if it was). Survivors stay up to the largest share
        departed that was within the bound. Raises ValueError for a bound that is no positive number.
        """
        if not max_kl > 0.0:
            raise ValueError(f"max_kl {max_kl} must be above 0.0 nats")
        minimum: Guarantee = "exact"
        found: dict[str, Any] = {}
        for guarantee in ("patched", "orbit", "near", "blind"):
            rows = self.of(guarantee)
            if guarantee == "near" and not rows:
                continue
            if not rows or max(row.kl.high for row in rows) > max_kl:
                break
            minimum = guarantee
            if guarantee == "near":
                found["max_divergence"] = max(row.departed or 0.0 for row in rows)
        if minimum == "exact":
            return {"minimum": "exact", "on_miss": "prefill", "on_leave": "exact"}
        found |= {"minimum": minimum, "on_leave": "repair"}
        found |= {"rank": self.rank, "patch_bytes": self.patch_bytes}
        for row in self.of("survivor"):
            if row.kl.high > max_kl:
                break
            found |= {"on_leave": "keep", "max_departed": row.departed}
        return found

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, atomically. Raises StoreError if the operating system refuses."""
        content = asdict(self)
        document = {"format": FORMAT, "sha256": _digest(content), "report": content}
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        try:
            with publish_file(Path(path), 0o666) as file:
                file.write(text.encode())
        except OSError as error:
            raise StoreError(f"the report cannot be written to {str(path)!r}: {error}") from None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CertifyReport:
        """Read a report. Raises InvalidReport for a missing file, another format, damage or an edit."""
        where = repr(str(path))
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            form, seal, content = document["format"], document["sha256"], document["report"]
            if form != FORMAT:
                why = f"{where} is of report format {form!r}, this version reads {FORMAT}"
            elif seal != _digest(content):
                why = f"{where} was changed after it was written: its digest does not match"
            else:
                return _CONVERTER.structure(content, cls)
        except FileNotFoundError:
            why = f"no report at {where}"
        except cattrs.BaseValidationError as error:
            why = f"{where} is no report ({'; '.join(cattrs.transform_error(error))})"
        except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
            why = f"{where} is no report ({type(error).__name__}: {error})"
        raise InvalidReport(f"{why}: {_REMEDY}")


def _digest(content: Any) -> str:
    # as JSON gives it back, so that what is written and what is read have one digest
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()


def _check_type(value: Any, kind: type) -> Any:
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"{value!r} is no {kind.__name__}")


for _kind in (str, int, float):  # cattrs itself takes "12" for 12
    _CONVERTER.register_structure_hook(_kind, _check_type)
