"""``kamera doctor``: proves on a model that Kamera supports it, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from kamera.cli.command import command
from kamera.cli.options import Loading, Model
from kamera.cli.output import Output, facts, finite, listing
from kamera.engines.hf import (
    HfEngine,
    OperatorProof,
    describe,
    prove_cuts,
    prove_moves,
    prove_patch,
    prove_relocation,
)
from kamera.errors import UnsupportedBackbone
from kamera.trust import ReusePolicy
from kamera.window import grounds_of
from kamera.window.certified import find_certificate, folders

_SPAN = 64
"""Upper bound on the tokens of any proof."""


@command
def doctor(
    model: Model,
    loading: Loading,
    out: Output,
    system: Annotated[
        str | None, typer.Option(help="System prompt to cut the chat template with (default: its own).")
    ] = None,
) -> None:
    """Probe a model, prove relocation and patching on it, and report supported or refused.

    Exit code 0: supported. 1: refused, with the reason.
    """
    try:
        backbone = loading.load(model, show_progress=out.shows_progress)
    except UnsupportedBackbone as error:
        document = {"model": model, "supported": False, "reason": str(error)}
        out.write(document, [f"{model}: refused", f"  {error}"])
        raise typer.Exit(1) from None
    proofs = dict(out.over(_prove(backbone), len(_claims(backbone)) + 3, "proof"))
    failed = next((claim for claim, proof in proofs.items() if not proof.holds), None)
    reason = None
    if failed is not None:
        proof = proofs[failed]
        reason = backbone.facts.no_reuse or (
            f"{failed} is off by {proof.error:.1e} at {proof.worst}, over the tolerance "
            f"of {proof.tolerance:.0e}: its KV cannot be served elsewhere"
        )
    document = {
        "model": model,
        "supported": failed is None,
        "reason": reason,
        "backbone": asdict(describe(backbone)),
        **_reading(backbone, system),
        "proofs": [
            finite({"claim": claim, **asdict(proof), "holds": proof.holds}) for claim, proof in proofs.items()
        ],
        "certificate": _certificate(backbone),
        "notes": _notes(backbone),
    }
    out.write(document, _tables(document))
    if failed is not None:
        raise typer.Exit(1)


def _claims(backbone: HfEngine) -> dict[str, tuple[int, ...]]:
    """Offsets to prove relocation at; a model with a position limit is tried as far as it reaches."""
    far = 1000 if backbone.limits.below is None else max(1, min(1000, backbone.limits.below - _SPAN))
    if backbone.axes == 1:
        return {"relocation, uniform": (far,)}
    return {
        "relocation, uniform": (far,) * backbone.axes,
        "relocation, time only": (far, *(0,) * (backbone.axes - 1)),
        "relocation, per axis": (min(500, far), 7, -11)[: backbone.axes],
    }


def _prove(backbone: HfEngine) -> Iterator[tuple[str, OperatorProof]]:
    yield "a forward in pieces", prove_cuts(backbone)
    for claim, offset in _claims(backbone).items():
        yield claim, prove_relocation(backbone, offset=offset)
    yield "full-rank patch, moved on", prove_patch(backbone)
    yield "moves in the live cache", prove_moves(backbone)


def _reading(backbone: HfEngine, system: str | None) -> dict[str, Any]:
    """What its processor takes, and the number of anchor tokens under this system prompt."""
    builder, template = backbone.builder, backbone.builder.format
    if template is None:
        return {"processor": None, "modalities": [], "anchor_tokens": None}
    pictures = builder.takes_pixels and "image" in template.kinds
    seen = ["image", "video" if "video" in template.kinds else "video as images"] if pictures else []
    anchor = builder.tokenize(builder.seams(system).prefix, special=not template.has_template)
    return {
        "processor": {
            "class": type(template.processor).__name__,
            "chat_template": template.has_template,
            "images": "image" in template.kinds,
            "videos": "video" in template.kinds,
        },
        "modalities": ["text", *seen],
        "anchor_tokens": int(anchor.shape[0]),
    }


def _certificate(backbone: HfEngine) -> str:
    """Which guarantees a window whose policy admits all of them would serve here, and if none why."""
    grounds = grounds_of(backbone, ReusePolicy(certified=False).budget)
    found = find_certificate(grounds, folders())
    certificate = found.certificate
    if certificate is None:
        return f"none that serves ({found.refusal}); run kamera certify"
    safe = [guarantee for guarantee in certificate.safe if guarantee not in found.denied]
    others = {g: f"{g} {f.verdict}" for g, f in certificate.findings.items() if g not in safe}
    others |= {g: f"{g} unsafe" for g in found.denied}
    withheld = f"; withheld: {', '.join(others.values())}" if others else ""
    probe = f"(probe {certificate.probe!r}, {certificate.created})"
    return f"serves {', '.join(safe)} at rank {grounds.budget.rank}{withheld} {probe}"


def _notes(backbone: HfEngine) -> list[str]:
    notes, kind = list[str](), backbone.facts.dtype
    if kind not in ("float32", "float64"):
        notes.append(
            f"in {kind} two forwards differ by rounding, so deeper layers are compared with the rounding of "
            "channels that no move turns: use --dtype float32 to compare every layer with 1e-4"
        )
    if backbone.limits.below is not None:
        notes.append(f"windows must stay below position {backbone.limits.below}: {backbone.limits.reason}")
    if backbone.builder.format is None:
        notes.append("no processor: chunks come from chunk_from_tensors, questions are token ids")
    return notes


def _tables(document: dict[str, Any]) -> Iterator[Table | str]:
    found, processor = document["backbone"], document["processor"]
    limit = found["position_limit"]
    yield facts(
        document["model"],
        [
            ("class", f"{found['model_class']} ({found['model_type']})"),
            ("family", f"{found['family']}, {found['kv_layers']} of {found['layers']} layers keep KV"),
            ("channels", ", ".join(found["channels"])),
            ("bytes per token", found["bytes_per_token"]),
            ("dtype", f"{found['dtype']} on {', '.join(found['devices'])}, {found['attention']} attention"),
            ("rotary", f"{found['rotary_dim']} dims, {found['pairing']}, axes {found['axis_order']}"),
            ("attention scaling", found["attention_scaling"]),
            ("position limit", "none" if limit is None else f"{limit}: {found['limit_reason']}"),
            ("processor", "none" if processor is None else processor["class"]),
            ("modalities", ", ".join(document["modalities"]) or "tensors only"),
            ("anchor", "" if document["anchor_tokens"] is None else f"{document['anchor_tokens']} tokens"),
            ("fingerprint", found["fingerprint"]),
            ("certificate", document["certificate"]),
        ],
    )
    yield ""
    columns = ("claim", "offset", "error", "tolerance", "worst", "holds")
    powers = {"error": ".1e", "tolerance": ".0e"}
    shown = [
        {n: f"{v:{powers[n]}}" if n in powers and v is not None else v for n, v in proof.items()}
        | {"offset": str(tuple(proof["offset"])), "holds": "yes" if proof["holds"] else "NO"}
        for proof in document["proofs"]
    ]
    yield listing("", columns, [[proof[name] for name in columns] for proof in shown])
    yield ""
    yield from (f"note: {note}" for note in document["notes"])
    yield "supported" if document["supported"] else f"refused: {document['reason']}"
