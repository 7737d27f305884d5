"""Tables of a benchmark run: a row per arm, and one table per grouping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kamera.cli.output import listing

if TYPE_CHECKING:
    from kamera.eval.tasks.report import Results


def tables(results: Results) -> list[Any]:
    """All tables of a run."""
    columns = (
        *("arm", "n", "official", "mean", "95 %", "agreement", "with native", "flip-recover", "KL", "eta"),
        *("forwards", "reused tokens", "live tokens", "patch bytes", "TTFT s", "answer s"),
    )
    rows = [
        (
            row.arm,
            row.summary.n,
            _number(row.summary.official),
            _number(row.summary.mean),
            "" if math.isnan(row.interval.mean) else f"{row.interval.low:.3f}..{row.interval.high:.3f}",
            _number(row.agreement),
            _number(row.native_agreement),
            _number(row.flip_recover),
            "" if math.isnan(row.first_token_kl) else f"{row.first_token_kl:.1e}",
            _number(row.eta.mean),
            f"{row.forwards:.1f}",
            f"{row.reused_tokens:.0f}",
            f"{row.live_tokens:.0f}",
            f"{row.kv_share:.1%}",
            f"{row.seconds:.3f}",
            f"{row.answer_seconds:.3f}",
        )
        for row in results.arms
    ]
    notes = "; ".join(f"{count} {note} under {arm}" for arm, note, count in results.notes)
    title = (
        f"{results.task}: {results.items} items, {results.labelled} labelled, {results.skipped} skipped"
        f"{'; ' + notes if notes else ''}\nofficial: {results.arms[0].summary.how}"
    )
    return [listing(title, columns, rows), *_groups(results)]


def _groups(results: Results) -> list[Any]:
    """One table for each grouping: a row per cell, a column per arm."""
    out = []
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results.arms:
        for group in row.summary.groups:
            cells.setdefault(group.by, {}).setdefault(group.label, {})[row.arm] = group
    names = [row.arm for row in results.arms]
    for by, labels in cells.items():
        rows = [
            (
                label,
                max(group.n for group in by_arm.values()),
                *(_number(by_arm[arm].score) if arm in by_arm else "" for arm in names),
            )
            for label, by_arm in labels.items()
        ]
        out.append(listing(f"\nby {by}", (by, "n", *names), rows))
    return out


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"
