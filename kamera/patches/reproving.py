"""Patches are proved again when a question comes that is unlike those they were proved on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from kamera.errors import KameraError
from kamera.ops import Proof
from kamera.patches.chunks import Copy, Facts
from kamera.patches.line import Line

if TYPE_CHECKING:
    from kamera.patches.former import Former

logger = logging.getLogger(__name__)


def prove_again(former: Former, chunks: Sequence[Facts], doubted: Collection[int]) -> None:
    """Form and prove the patches of the ``doubted`` of ``chunks`` anew, each behind all before it, exactly.

    One exact forward of each chunk up to the last doubted one. A patch that fails is stored with that proof,
    so it is not placed any more, and the next report says so. An error ends it, and is logged.
    """
    prover = former.prover
    assert prover is not None, "no patch is served for a proof where none is asked for"
    line = Line(former)
    try:
        for i, chunk in enumerate(chunks[: max(doubted) + 1]):
            before = line.before
            copy = line.append(chunk)
            if i in doubted and former.keep_patch(chunk, copy, "exact", before):
                row = former.store.info(former.context, chunk.chunk_id, copy.antecedents, "exact")
                proof = None if row is None else row.proof
                if proof is None:
                    continue
                prover.again[chunk.chunk_id, copy.antecedents] = proof
                if not proof.within(prover.tolerance):
                    _disproved(former, copy, chunk, proof)
    except (KameraError, torch.OutOfMemoryError) as error:
        # past the last position, or no room for a second cache: no operation waits for this
        logger.warning("patches were not proved again: %s", error)


def _disproved(former: Former, copy: Copy, chunk: Facts, proof: Proof) -> None:
    said = (
        f"the patch of chunk {chunk.chunk_id[:12]} behind {len(copy.antecedents)} others does not hold for a "
        f"question unlike those it was proved on ({proof}): it is not served any more; place the chunk anew "
        "where it still stands"
    )
    logger.warning("%s", said)
    former.losses.leave(said)
