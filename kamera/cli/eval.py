"""``kamera eval TASK``: fidelity tables."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Annotated

import torch
import typer

from kamera.cli.command import command
from kamera.cli.output import Output, finite, listing


@command
def fidelity(
    out: Output,
    items: Annotated[int, typer.Option(min=1, help="Two-hop questions per row.")] = 500,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the patches.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the held-out episodes.")] = 0,
) -> None:
    """Re-prefill, blind reuse, patch and stale patch after recall, reorder and turnover.

    On the shipped backbone and held-out episodes of its world.
    """
    from kamera import Backbone, __version__, testbed
    from kamera.eval.fidelity import Fidelity, measure

    backbone = Backbone(*testbed.load())
    with out.progress(items, "question") as bar:
        for step in measure(backbone, items=items, rank=rank, seed=seed):
            if isinstance(step, Fidelity):
                table = step
            else:
                bar.update(step[0] - bar.n)
    document = finite(
        {
            "command": f"kamera eval fidelity --items {items} --rank {rank} --seed {seed}",
            "kamera": __version__,
            "backbone": backbone.fingerprint,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            **asdict(table),
        }
    )
    columns = (
        *("after", "question", "arm", "n", "accuracy", "95 %"),
        *("KL", "eta", "agreement", "flip-recover"),
    )
    rows = [
        (
            s.operation,
            s.kind,
            s.arm,
            s.n,
            f"{s.accuracy.mean:.3f}",
            f"{s.accuracy.low:.3f}..{s.accuracy.high:.3f}",
            f"{s.kl:.1e}",
            f"{s.eta:.3f}",
            f"{s.agreement:.3f}",
            f"{s.flip_recover:.3f}",
        )
        for s in table.scores
    ]
    title = (
        f"{table.episodes} episodes, patches of rank {table.rank}: {table.patch_bytes / table.kv_bytes:.1%} "
        "of the chunk's KV bytes"
    )
    out.write(document, [listing(title, columns, rows)])
