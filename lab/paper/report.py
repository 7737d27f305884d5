"""The Markdown page of a result: every number in it is the JSON document's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lab.paper import frontier
from lab.paper.deficit import NAME as DEFICIT
from lab.paper.document import Document, View, views
from lab.paper.sections import INTRODUCTION, SECTIONS, Section
from lab.paper.tally import ONE
from lab.paper.verdicts import judge_all, too_weak


def render(result: Document, plots: Sequence[str]) -> str:
    """The page; ``plots`` are the file names of the figures beside it."""
    return "\n".join(_page(result, plots)) + "\n"


def _page(result: Document, plots: Sequence[str]) -> Iterator[str]:
    families = views(result)
    yield "# The paper's tables on four attention families"
    yield ""
    yield from _provenance(result, families)
    if plots:
        yield ""
        yield " ".join(f"![{name.removesuffix('.png')}]({name})" for name in plots)
    yield ""
    yield from _disagreements(result)
    yield from _deficit(families)
    for view in families:
        yield from _frontier(view)
    for section in SECTIONS:
        yield f"## {section.title}"
        yield ""
        yield section.what
        yield ""
        yield from _section(section, families)
    yield from _claims(result)


def _provenance(result: Document, families: Sequence[View]) -> Iterator[str]:
    machine, versions = result["machine"], result["versions"]
    libraries = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    yield (
        f"`{result['command']}`, commit {result['commit']}, {machine['cores']} cores of "
        f"{machine['processor']}, no GPU, {libraries}, {result['dtype']}, {result['seconds']:.0f} s. "
        "All rows, with intervals: [`paper.json`](paper.json)."
    )
    yield ""
    yield INTRODUCTION
    yield ""
    yield from _table(
        ("family", "model", "layers", "channels", "served chunk", "episodes", "seconds"),
        [
            (
                v.name,
                v.family["model"],
                v.family["layers"],
                ", ".join(v.family["channels"]),
                f"{v.family['chunk tokens']} tokens, {v.family['chunk bytes'] / 1024:.0f} KiB",
                v.family["episodes"],
                f"{v.family['seconds']:.0f}",
            )
            for v in families
        ],
    )


def _disagreements(result: Document) -> Iterator[str]:
    yield "## Where these small backbones disagree with the paper"
    yield ""
    judged = judge_all(result)
    found = False
    for view in views(result):
        if (full := too_weak(view)) is not None:
            yield (
                f"* **{view.name} cannot tell**: re-prefilled it answers {full:.2f}, so it binds nothing "
                "that reuse could lose; it is held against no claim."
            )
    for claim, verdicts in judged:
        against = {name: v.text for name, v in verdicts.items() if v.agrees is False}
        if against:
            found = True
            values = "; ".join(f"{name} {text}" for name, text in against.items())
            yield f"* **{claim.name}.** Paper: {claim.paper}. Here: {values}. (Agreement: {claim.counts}.)"
    if not found:
        yield "Nowhere, by the comparisons at the end of this page."
    yield ""


def _claims(result: Document) -> Iterator[str]:
    names = list(result["families"])
    yield "## Every comparison"
    yield ""
    marks = {True: "agrees", False: "**differs**", None: "–"}
    rows = [
        (
            claim.name,
            claim.paper,
            claim.counts,
            *(f"{verdicts[n].text}: {marks[verdicts[n].agrees]}" for n in names),
        )
        for claim, verdicts in judge_all(result)
    ]
    yield from _table(("claim", "paper", "counts as agreement", *names), rows)


def _deficit(families: Sequence[View]) -> Iterator[str]:
    yield "## 1. Shape of the deficit"
    yield ""
    yield (
        "Relative norm ‖Δ‖ / ‖KV(B|∅)‖, and directions that hold 90 % of the energy (in brackets: as a "
        "share of the chunk's tokens), per layer and channel."
    )
    yield ""
    layers = sorted({int(s["layer"]) for v in families for s, _ in v.numbers(DEFICIT, "relative norm")})
    rows: list[Sequence[Any]] = []
    for view in families:
        norms = {(s["channel"], s["layer"]): x for s, x in view.numbers(DEFICIT, "relative norm")}
        ranks = {(s["channel"], s["layer"]): x for s, x in view.numbers(DEFICIT, "rank for 90 %")}
        shares = {
            (s["channel"], s["layer"]): x for s, x in view.numbers(DEFICIT, "rank for 90 % over tokens")
        }
        for channel in dict.fromkeys(name for name, _ in norms):
            rows.append(
                (view.name, channel, "relative norm", *(number_text(norms.get((channel, i))) for i in layers))
            )
            cells = [
                f"{ranks[at][0]:.0f} ({shares[at][0]:.2f})" if (at := (channel, i)) in ranks else ""
                for i in layers
            ]
            rows.append((view.name, channel, "rank for 90 %", *cells))
    yield from _table(("family", "channel", "", *(f"layer {i}" for i in layers)), rows)
    yield (
        "Share of the chunk's tokens that holds 90 % of ‖Δ‖² (layers and channels each relative to their "
        "own energy):"
    )
    yield ""
    spread = [
        (v.name, number_text(x)) for v in families for _, x in v.numbers(DEFICIT, "share of tokens for 90 %")
    ]
    yield from _table(("family", "share"), spread)
    yield "KL to the re-prefill (nats) against the rank m of the plain patch:"
    yield ""
    ranks_shown = (*frontier.RANKS, frontier.HIGHEST)
    kls = [
        (
            v.name,
            number_text(v.row(frontier.NAME, "blind")["kl"]),
            *(number_text(v.row(frontier.NAME, "patch", rank=r)["kl"]) for r in ranks_shown),
        )
        for v in families
    ]
    yield from _table(("family", "blind", *(f"m = {r}" for r in ranks_shown)), kls)


def _frontier(view: View) -> Iterator[str]:
    rows = view.rows(frontier.NAME)
    yield f"## 2. Repair frontier: {view.name}"
    yield ""
    yield (
        "η and accuracy on multi-hop questions at matched KV bytes: at most those of a plain rank-m patch "
        "(deep-half and the shared basis spend less, see the prices below)."
    )
    yield ""
    arms = dict.fromkeys(
        r["arm"] for r in rows if "rank" in r["setting"] and r["setting"]["rank"] in frontier.RANKS
    )
    cells = {(r["arm"], r["setting"].get("rank")): r for r in rows}
    share = {r: view.mean(frontier.NAME, "patch", "share", rank=r) for r in frontier.RANKS}
    yield from _table(
        ("arm", *(f"m = {r} ({share[r]:.1%})" for r in frontier.RANKS)),
        [
            (
                arm,
                *(_brief(cells[arm, r]) for r in frontier.RANKS),
            )
            for arm in arms
        ],
    )
    hops = [kind for kind in dict.fromkeys(r["kind"] for r in view.family["rows"]) if kind.endswith("hops")]
    if hops:
        yield "Accuracy by hops:"
        yield ""
        shown = (("reprefill", {}), ("blind", {}), *(("patch", {"rank": r}) for r in (4, 16)))
        yield from _table(
            ("arm", *hops),
            [
                (
                    _label({"arm": arm, "setting": at}),
                    *(number_text(view.row(frontier.NAME, arm, k, **at)["accuracy"]) for k in hops),
                )
                for arm, at in shown
            ],
        )
    yield "<details><summary>All arms with intervals and prices</summary>"
    yield ""
    yield from full_rows(rows)
    yield "One-hop control:"
    yield ""
    yield from full_rows(view.rows(frontier.NAME, ONE))
    yield "</details>"
    yield ""


def full_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from _table(
        (
            *("arm", "n", "accuracy", "KL, nats", "η", "flips restored", "agreement"),
            *("bytes of own KV", "of bf16 KV", "tokens recomputed", "forwards"),
        ),
        [
            (
                _label(r),
                r["n"],
                *(number_text(r[name]) for name in ("accuracy", "kl", "eta", "flip_recover", "agreement")),
                f"{r['share']:.1%}",
                f"{r['share_bf16']:.1%}",
                f"{r['tokens']:.0f}",
                f"{r['forwards']:.0f}",
            )
            for r in rows
        ],
    )


def _section(section: Section, families: Sequence[View]) -> Iterator[str]:
    """Settings and arms down, families across."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for view in families:
        for row in view.rows(section.name):
            parts = [f"{row['accuracy'][0]:.2f}", number_text(row[section.shows]) or "–"]
            if row["share"]:
                parts.append(f"{row['share_bf16']:.1%}")
            cells.setdefault((words_of(row["setting"]), row["arm"]), {})[view.name] = " · ".join(parts)
    names = [v.name for v in families]
    shown = {"eta": "η", "kl": "KL to the re-prefill in nats"}[section.shows]
    yield f"Cells: accuracy · {shown} [95 %] · bytes stored over the chunk's KV."
    yield ""
    yield from _table(
        ("setting", "arm", *names), [(*label, *(by.get(n, "") for n in names)) for label, by in cells.items()]
    )
    measured: dict[tuple[str, str], dict[str, str]] = {}
    for view in families:
        for number in view.family["numbers"]:
            if number["section"] == section.name:
                label = (number["name"], words_of(number["setting"]))
                measured.setdefault(label, {})[view.name] = number_text(number["value"])
    if measured:
        yield from _table(
            ("measured", "setting", *names),
            [(*label, *(by.get(n, "") for n in names)) for label, by in measured.items()],
        )


def _brief(row: Mapping[str, Any]) -> str:
    """η and accuracy."""
    eta = "–" if row["eta"] is None else f"{row['eta'][0]:.3f}"
    return f"{eta} · {row['accuracy'][0]:.2f}"


def _label(row: Mapping[str, Any]) -> str:
    setting = row["setting"]
    if "rank" in setting:
        return f"{row['arm']}@{setting['rank']}"
    return f"{row['arm']}@{setting['percent']}" if "percent" in setting else str(row["arm"])


def words_of(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def number_text(value: Sequence[float] | None) -> str:
    """A mean with its interval, in as many digits as it has."""
    if value is None:
        return ""
    mean, low, high = value
    small = 0 < abs(mean) < 0.01
    form = "{:.1e}" if small else "{:.3f}"
    return f"{form.format(mean)} [{form.format(low)}, {form.format(high)}]"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"
    yield ""
