"""What it costs vLLM's scheduler that prompts are recognised: 64 chunks in a prompt, a table of 50,000 rows.

It runs the connector inside vLLM (the environment of `.ci/vllm`), on prompts without a recipe that the store
then supplies. The store has what these prompts need; the other rows, which no prompt leads to, are put into
the table alone, since the scheduler's side looks at nothing else. Times are of the calls that vLLM's
scheduler makes for one request, in processor time of its thread and in wall time; loads are not in them.

`python -m lab.recognised_prompts --out docs/results/recognised-prompts.json`
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.ops import Patch, PatchBudget, chunk_id, deficit, digest, kv_map
from kamera.store import CanonicalRecord, ObjectInfo, Outline, PatchRecord
from kamera.testbed import World
from lab.results import keep

CHUNKS, ROWS, PROMPTS = 64, 50_000, 200
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
        self.window.keep()
        self.context = self.window.context
        (row,) = self.store.ls("canonical")
        picture = self.store.get_canonical(self.context, row.chunk_id)
        assert picture is not None and picture.outline is not None
        self.advance = picture.outline.advance
        self.picture = replace(picture, vision="", embedding="", outline=None)
        self.draw = np.random.default_rng(0)
        pool = [self._picture(i) if i % 2 else self._text() for i in range(POOL)]
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
        ids, start = torch.from_numpy(self.draw.integers(20, 600, tokens)), int(self.picture.positions.min())
        places = torch.arange(start, start + tokens).expand(3, -1).contiguous()
        return ids, places, Outline.of(ids, places, (tokens,) * 3)

    def _text(self) -> CanonicalRecord:
        ids, places, outline = self._words(TEXT)
        kv = kv_map(self.picture.kv, lambda t: t[:, :, :1].expand(-1, -1, TEXT, -1).contiguous())
        made = replace(self.picture, chunk_id=chunk_id(ids, {}), input_ids=ids, positions=places, kv=kv)
        return replace(made, inputs={}, outline=outline)

    def row(self) -> ObjectInfo:
        """A row of a chunk that no prompt has."""
        ids, _, outline = self._words(TEXT + int(self.draw.integers(0, 50)))
        name = outline.ids
        return ObjectInfo(
            name, "canonical", name, self.context, (), len(ids), None, None, 1, 0.0, outline=outline
        )

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
    llm = start(model, folder / "store", options, **limits)
    scheduler = scheduler_of(llm)
    side = scheduler.connector.scheduler
    began = time.monotonic()
    while side.prompts.tables.of("") is None:
        time.sleep(0.05)
    read, clock, tokens = time.monotonic() - began, Clock(), []
    table = side.prompts.tables.of("")
    while table.rows < ROWS:
        table.add(filled.row())
    llm.generate([filled.prompt(filled.prompts[0])], greedy(tokens=1), use_tqdm=False)  # imports, kernels
    for method in METHODS:
        clock.watch(scheduler.connector, method)
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    for names in filled.prompts:
        before = side.counts.supplied_tokens
        (out,) = llm.generate([filled.prompt(names)], greedy(tokens=1), use_tqdm=False)
        tokens.append(len(out.prompt_token_ids))
        assert side.counts.supplied_tokens - before >= tokens[-1] - 2 - 32, "it was not supplied"
    return {
        "objects": len(filled.store.ls()),
        "rows": table.rows,
        "chunks": CHUNKS,
        "prompts": PROMPTS,
        "median_tokens": int(np.median(tokens)),
        "first_reading_of_rows_s": round(read, 2),
        "times": clock.table(),
    }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder))
    print(json.dumps(found, indent=1))
    if out is not None:
        keep(found, out)


if __name__ == "__main__":
    main()
