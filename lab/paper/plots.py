"""The figures of a result, as small PNG files. Needs matplotlib: ``pip install "kamera[plots]"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.paper import envelope, frontier, modality, recall, reorder
from lab.paper.deficit import NAME as DEFICIT
from lab.paper.document import Document, View, views
from lab.paper.draw import RANK

_DPI = 80
_OURS = {"patch": "C0", "best": "C3", "deep-half": "C1", "shared-basis": "C2"}


def draw(result: Document, folder: Path) -> list[str]:
    """Write every measured figure into ``folder``; their names. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    families = views(result)
    written = []
    for name, plot in FIGURES.items():
        if not all(_measured(view, name) for view in families):
            continue
        figure = Figure(figsize=(3.4 * len(families) + 0.6, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
        for panel, view in zip(panels, families, strict=True):
            plot(panel, view)
            panel.set_title(view.name)
            panel.grid(alpha=0.3)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=7)
        figure.savefig(folder / f"{name}.png", dpi=_DPI, metadata={"Software": None})
        written.append(f"{name}.png")
    return written


def _measured(view: View, figure: str) -> bool:
    """True if the figure's section was measured."""
    section = _OF[figure]
    return any(row["section"] == section for row in (*view.family["rows"], *view.family["numbers"]))


def _frontier(panel: Any, view: View) -> None:
    arms: dict[str, list[tuple[float, float]]] = {}
    for row in view.rows(frontier.NAME):
        if row["eta"] and ("rank" in row["setting"] or "percent" in row["setting"]):
            arms.setdefault(row["arm"], []).append((100 * row["share_bf16"], row["eta"][0]))
    for arm, points in arms.items():
        ours = arm in _OURS
        style: dict[str, Any] = {"color": _OURS[arm], "lw": 2} if ours else {"lw": 1, "ls": "--"}
        shown = sorted(p for p in points if p[0] > 0)
        panel.plot([x for x, _ in shown], [y for _, y in shown], marker=".", label=arm, **style)
    panel.set_xscale("log")
    panel.set_xlabel("bytes stored, % of the chunk's bf16 KV")
    panel.set_ylabel("η on multi-hop questions")
    panel.set_ylim(-0.15, 1.05)


def _deficit(panel: Any, view: View) -> None:
    channels: dict[str, list[tuple[int, float]]] = {}
    for setting, value in view.numbers(DEFICIT, "relative norm"):
        channels.setdefault(str(setting["channel"]), []).append((int(setting["layer"]), value[0]))
    for channel, points in channels.items():
        panel.plot([x for x, _ in points], [y for _, y in points], marker="o", label=channel)
    panel.set_xlabel("layer")
    panel.set_ylabel("‖Δ‖ / ‖KV(B|∅)‖")


def _kl(panel: Any, view: View) -> None:
    rows = [r for r in view.rows(frontier.NAME) if r["arm"] in _OURS]
    for arm, colour in _OURS.items():
        points = [(r["setting"]["rank"], max(r["kl"][0], 1e-9)) for r in rows if r["arm"] == arm]
        if points:
            panel.plot([x for x, _ in points], [y for _, y in points], marker=".", color=colour, label=arm)
    panel.axhline(view.mean(frontier.NAME, "blind", "kl"), color="gray", ls=":", label="blind")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("rank m whose bytes are spent")
    panel.set_ylabel("KL to the re-prefill, nats")


def _lines(section: str, arms: Sequence[str], over: str, label: str) -> Callable[[Any, View], None]:
    """η with its interval over one setting, a line for each arm."""

    def plot(panel: Any, view: View) -> None:
        for arm in arms:
            rows = [r for r in view.rows(section) if r["arm"] == arm and r["eta"] is not None]
            at = [r["setting"][over] for r in rows]
            mean = [r["eta"][0] for r in rows]
            spread = [[r["eta"][0] - r["eta"][1] for r in rows], [r["eta"][2] - r["eta"][0] for r in rows]]
            panel.errorbar(at, mean, yerr=spread, marker="o", capsize=3, label=arm)
        panel.axhline(0, color="gray", lw=0.8)
        panel.set_xlabel(label)
        panel.set_ylabel(f"η at rank {RANK}")

    return plot


def _modality(panel: Any, view: View) -> None:
    rows = view.rows(modality.NAME)
    windows = list(dict.fromkeys(r["setting"]["window"] for r in rows))
    arms = {"reprefill": None, "blind": None, "patch": RANK}
    for i, (arm, rank) in enumerate(arms.items()):
        heights = [r["accuracy"][0] for r in rows if r["arm"] == arm and r["setting"].get("rank") == rank]
        panel.bar([x + 0.27 * (i - 1) for x in range(len(windows))], heights, width=0.25, label=arm)
    panel.set_xticks(range(len(windows)), windows, rotation=60, ha="right", fontsize=7)
    panel.set_ylabel("accuracy, multi-hop")


FIGURES: dict[str, Callable[[Any, View], None]] = {
    "frontier": _frontier,
    "deficit": _deficit,
    "kl": _kl,
    "reorder": _lines(reorder.NAME, ("exact", "orbit", "transfer"), "K", "antecedents K"),
    "recall": _lines(recall.NAME, ("fresh", "stale"), "replaced", "antecedents replaced, of 3"),
    "distractors": _lines(envelope.SUPERSET, ("rebuilt", "stale"), "distractors", "distractors in front"),
    "modality": _modality,
}
"""File name without its ending, and what draws one family's panel."""

_OF = {
    "frontier": frontier.NAME,
    "deficit": DEFICIT,
    "kl": frontier.NAME,
    "reorder": reorder.NAME,
    "recall": recall.NAME,
    "distractors": envelope.SUPERSET,
    "modality": modality.NAME,
}
"""The section a figure shows."""
