"""``kamera doctor``: proves on a model that Kamera supports it, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from kamera.cli.command import command
from kamera.cli.options import Loading, Model
from kamera.cli.output import Output, facts_table, listing, nan_to_null
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
    proofs = dict(out.track(_prove(backbone), len(_claims(backbone)) + 3, "proof"))
    failed_claim = next((claim for claim, proof in proofs.items() if not proof.holds), None)
    reason = None
    if failed_claim is not None:
        proof = proofs[failed_claim]
        reason = backbone.facts.no_reuse or (
            f"{failed_claim} is off by {proof.error:.1e} at {proof.worst}, over the tolerance "
            f"of {proof.tolerance:.0e}: its KV cannot be served elsewhere"
        )
    document = {
        "model": model,
        "supported": failed_claim is None,
        "reason": reason,
        "backbone": asdict(describe(backbone)),
        **_reading(backbone, system),
        "proofs": [
            nan_to_null({"claim": claim, **asdict(proof), "holds": proof.holds})
            for claim, proof in proofs.items()
        ],
        "notes": _notes(backbone),
    }
    out.write(document, _tables(document))
    if failed_claim is not None:
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
    media = ["image", "video" if "video" in template.kinds else "video as images"] if pictures else []
    anchor = builder.tokenize(builder.seams(system).prefix, special=not template.has_template)
    return {
        "processor": {
            "class": type(template.processor).__name__,
            "chat_template": template.has_template,
            "images": "image" in template.kinds,
            "videos": "video" in template.kinds,
        },
        "modalities": ["text", *media],
        "anchor_tokens": int(anchor.shape[0]),
    }


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
    model, processor = document["backbone"], document["processor"]
    limit = model["position_limit"]
    yield facts_table(
        document["model"],
        [
            ("class", f"{model['model_class']} ({model['model_type']})"),
            ("family", f"{model['family']}, {model['kv_layers']} of {model['layers']} layers keep KV"),
            ("channels", ", ".join(model["channels"])),
            ("bytes per token", model["bytes_per_token"]),
            ("dtype", f"{model['dtype']} on {', '.join(model['devices'])}, {model['attention']} attention"),
            ("rotary", f"{model['rotary_dim']} dims, {model['pairing']}, axes {model['axis_order']}"),
            ("attention scaling", model["attention_scaling"]),
            ("position limit", "none" if limit is None else f"{limit}: {model['limit_reason']}"),
            ("processor", "none" if processor is None else processor["class"]),
            ("modalities", ", ".join(document["modalities"]) or "tensors only"),
            ("anchor", "" if document["anchor_tokens"] is None else f"{document['anchor_tokens']} tokens"),
            ("fingerprint", model["fingerprint"]),
        ],
    )
    yield ""
    columns = ("claim", "offset", "error", "tolerance", "worst", "holds")
    powers = {"error": ".1e", "tolerance": ".0e"}
    rows = [
        {n: f"{v:{powers[n]}}" if n in powers and v is not None else v for n, v in proof.items()}
        | {"offset": str(tuple(proof["offset"])), "holds": "yes" if proof["holds"] else "NO"}
        for proof in document["proofs"]
    ]
    yield listing("", columns, [[proof[name] for name in columns] for proof in rows])
    yield ""
    yield from (f"note: {note}" for note in document["notes"])
    yield "supported" if document["supported"] else f"refused: {document['reason']}"
