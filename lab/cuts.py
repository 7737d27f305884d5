"""How fast prompts are cut, hashed and indexed, and what of a moved region is found again, by rule.

    python -m lab.cuts speed [--output FILE]
    python -m lab.cuts moved [--draws 100] [--output FILE]
    python -m lab.cuts resync [--draws 100] [--output FILE]
    python -m lab.cuts lines [--draws 100] [--output FILE]

``lines`` holds the borders of a conversation's segments, which are line ends, against cuts anywhere.

Speeds are per second of CPU time of one core (best of several runs, so that neighbours count little).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from tokenizers import ByteLevelBPETokenizer
from xxhash import xxh3_128_digest

from kamera.content import candidates
from kamera.reuse import (
    DEFAULT_RULE,
    RULES,
    ContentIndex,
    CutRule,
    Prompt,
    cut_prompt,
)
from lab.agent_traces import Writer
from lab.line_cuts import line_borders
from lab.plain_cuts import plain_cuts
from lab.results import keep
from lab.reuse.recovery import covered
from lab.reuse.similar import SimilarIndex
from lab.reuse.words import word_ids
from lab.speed.machine import commit, machine

_SIZES = (64, 128, 256, 512, 1024, 2048)


def seconds(work: Callable[[], Any], runs: int = 15) -> float:
    """The least CPU time of ``runs``."""
    least = float("inf")
    for _ in range(runs):
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
    return least


def speed() -> list[dict[str, Any]]:
    """Rows of what, tokens, milliseconds and millions of tokens a second."""
    rows = []

    def row(what: str, tokens: int, work: Callable[[], Any], runs: int = 15) -> float:
        took = seconds(work, runs)
        rows.append({"what": what, "tokens": tokens, "ms": took * 1e3, "M tokens/s": tokens / took / 1e6})
        return took

    draw = np.random.default_rng(0)
    prompt = Prompt.of(draw.integers(0, 150_000, 1_000_000))
    for name in ("low", "high"):
        rule = RULES[name]
        row(f"{name}: Gear pass", len(prompt), lambda r=rule: candidates(prompt.ids, r.exponent, r.bits))
        row(f"{name}: cut (Gear, clamp)", len(prompt), lambda r=rule: cut_prompt(prompt, r))

        def cut_and_hash(r: CutRule = rule) -> list[bytes]:
            cuts = cut_prompt(prompt, r)
            return [xxh3_128_digest(prompt.slice(a, b)) for a, b in itertools.pairwise(cuts)]

        fast = row(f"{name}: cut and xxh3-128", len(prompt), cut_and_hash)
        part = prompt.ids[:50_000].tolist()

        def plainly(bits: str = rule.bits, part: list[int] = part) -> list[int]:
            return plain_cuts(part, bits=bits)

        slow = row(f"{name}: cut, plain Python", len(part), plainly, 3)
        rows[-1]["times slower"] = slow / len(part) / (fast / len(prompt))
    short = Prompt.of(prompt.ids[:100_000])
    moved = Prompt.of(np.concatenate([draw.integers(0, 150_000, 777), short.ids]))
    for name in (DEFAULT_RULE,):
        rule = RULES[name]
        row(f"{name}: index, insert", len(short), lambda r=rule: ContentIndex(r).add(short))
        full = ContentIndex(rule)
        full.add(short)
        row(f"{name}: index, find the same prompt", len(short), lambda f=full: f.find(short))
        row(f"{name}: index, find it moved", len(moved), lambda f=full: f.find(moved))
    writer = Writer(0)
    texts = [" ".join(writer.passage(10).split()[:128]) for _ in range(200)]
    tokens = sum(len(word_ids(t)) for t in texts)

    def liken() -> None:
        index = SimilarIndex()
        for number, text in enumerate(texts):
            index.add(str(number), text)

    row("similar: canonical text, words, MinHash, insert", tokens, liken, 5)
    return rows


def moved(draws: int) -> list[dict[str, Any]]:
    """Share of a region found again behind other text and before other text, by text, rule and size.

    ``false`` counts the hits whose tokens are not those of the segment they name.
    """
    rows = []
    for kind, source in (("prose", _prose()), ("table", _table), ("uniform", _uniform())):
        for name in RULES:
            row: dict[str, Any] = {"text": kind, "rule": name}
            false = 0
            for size in _SIZES:
                draw = np.random.default_rng(size)
                found = [_found(source, size, RULES[name], draw) for _ in range(draws)]
                row[str(size)] = mean(share for share, _ in found)
                false += sum(wrong for _, wrong in found)
            rows.append({**row, "false": false})
    return rows


def resync(draws: int) -> list[dict[str, Any]]:
    """Tokens from an edit to the first cut from which on all cuts are those of the unedited text."""
    rows = []
    for kind, source in (("prose", _prose()), ("table", _table), ("uniform", _uniform())):
        for bits in ("low", "high"):
            for exponent in (5, 6, 7, 8):
                rule = replace(RULES[bits], exponent=exponent)
                draw = np.random.default_rng(0)
                distances, forced, lengths = [], 0, []
                for _ in range(draws):
                    body = source(20_000, draw)
                    inserted = source(int(draw.integers(1, 600)), draw)
                    edited = np.concatenate([inserted, body])
                    before = cut_prompt(Prompt.of(body), rule)
                    after = {c - len(inserted) for c in cut_prompt(Prompt.of(edited), rule)}
                    apart = [c for c in before if c not in after]
                    distances.append(before[before.index(apart[-1]) + 1] if apart else 0)
                    sizes = np.diff(before)
                    forced += int((sizes == rule.maximum).sum())
                    lengths += sizes.tolist()
                mean_distance, late = float(np.mean(distances)), float(np.percentile(distances, 95))
                rows.append(
                    {
                        "text": kind,
                        "bits": bits,
                        "exponent": exponent,
                        "tokens a segment": mean(lengths),
                        "forced cuts": forced / len(lengths),
                        "tokens to meet, mean": mean_distance,
                        "95 %": late,
                    }
                )
    return rows


def lines(draws: int) -> list[dict[str, Any]]:
    """Borders at line ends and cuts anywhere, on texts under a byte-level BPE that was trained on them.

    ``goes``: the share of segments without which a text's tokens are what its tokenizer makes of the rest.
    """
    writer = Writer(2)
    kinds = {
        "prose, one line": lambda: writer.passage(60),
        "code": lambda: "\n".join(writer.code(16)),
        "logs": lambda: writer.log(40),
        "JSON": lambda: json.dumps([writer.tool() for _ in range(6)], indent=1),
    }
    tokenizer = ByteLevelBPETokenizer()
    texts = {kind: [make() for _ in range(draws)] for kind, make in kinds.items()}
    tokenizer.train_from_iterator(itertools.chain(*texts.values()), vocab_size=8_000, show_progress=False)
    ends = {i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).endswith("\n")}
    ways: dict[str, Callable[[list[int]], list[int]]] = {
        "line ends": lambda ids: [0, *line_borders(ids, 0, len(ids), ends), len(ids)],
        "anywhere": lambda ids: cut_prompt(Prompt.of(ids), RULES["high"]),
    }
    rows = []
    for (kind, made), (way, cutter) in itertools.product(texts.items(), ways.items()):
        draw = np.random.default_rng(0)
        lengths, apart, goes = list[int](), list[int](), list[bool]()
        for text in made:
            ids = tokenizer.encode(text).ids
            borders = cutter(ids)
            lengths += np.diff(borders).tolist()
            front = tokenizer.encode(writer.passage(int(draw.integers(1, 40))) + " ").ids
            after = {c - len(front) for c in cutter([*front, *ids])}
            missed = [c for c in borders if c not in after]
            apart.append(borders[borders.index(missed[-1]) + 1] if missed else 0)
            for start, stop in itertools.pairwise(borders):
                rest = [*ids[:start], *ids[stop:]]
                goes.append(tokenizer.encode(tokenizer.decode(rest)).ids == rest)
        forced = sum(length == RULES["high"].maximum for length in lengths) / len(lengths)
        row = {"text": kind, "borders": way, "tokens a segment": mean(lengths), "forced cuts": forced}
        rows.append(row | {"tokens to meet, mean": mean(apart), "goes": mean(goes)})
    return rows


def _found(
    source: Callable[[int, np.random.Generator], np.ndarray],
    size: int,
    rule: CutRule,
    draw: np.random.Generator,
) -> tuple[float, int]:
    """The share of a region that is found in another prompt, and the number of wrong hits."""
    region = source(size, draw)
    index = ContentIndex(rule)
    prompts = []
    for _ in range(2):
        head, tail = (source(int(draw.integers(200, 1_000)), draw) for _ in range(2))
        prompts.append((Prompt.of(np.concatenate([head, region, tail])), len(head)))
    index.add(prompts[0][0])
    asked, start = prompts[1]
    found = index.find(asked)
    hits = found.hits
    equal = [
        index.content(h.segment).ids[4 * h.offset :].startswith(asked.slice(h.start, h.stop)) for h in hits
    ]
    first = max(start, found.prefix)
    inside = first - start + covered(hits, first) - covered(hits, max(first, start + size))
    return inside / size, equal.count(False)


def _uniform() -> Callable[[int, np.random.Generator], np.ndarray]:
    return lambda count, draw: draw.integers(0, 150_000, count)


def _prose() -> Callable[[int, np.random.Generator], np.ndarray]:
    """Sentences, JSON and code of the made-up agents, taken from any place."""
    writer = Writer(1)
    parts = []
    for _ in range(60):
        parts += [writer.passage(60), json.dumps([writer.tool() for _ in range(6)], indent=1)]
        parts += ["\n".join(writer.code(8)), writer.log(20)]
    ids = np.array([i for part in parts for i in word_ids(part)])

    def take(count: int, draw: np.random.Generator) -> np.ndarray:
        start = int(draw.integers(0, len(ids) - count))
        return ids[start : start + count]

    return take


def _table(count: int, draw: np.random.Generator) -> np.ndarray:
    """Rows of JSON that differ in their numbers, as tools return them."""
    rows = []
    length = 0
    while length < count:
        status = ("ok", "failed", "late")[int(draw.integers(0, 3))]
        row = {"id": int(draw.integers(0, 10**6)), "status": status, "value": int(draw.integers(0, 100))}
        rows.append(word_ids(json.dumps(row) + ",\n"))
        length += len(rows[-1])
    return np.array([i for row in rows for i in row][:count])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.cuts")
    parser.add_argument("part", choices=("speed", "moved", "resync", "lines"))
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    parts = {"moved": moved, "resync": resync, "lines": lines}
    rows = speed() if asked.part == "speed" else parts[asked.part](asked.draws)
    for row in rows:
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if asked.output:
        draws = f" --draws {asked.draws}" if asked.part != "speed" else ""
        command = f"python -m lab.cuts {asked.part}{draws}"
        document = {"command": command, "commit": commit(), "machine": machine(), "rows": rows}
        keep(document, asked.output)


if __name__ == "__main__":
    main()
