"""Store, rows, plans and recipes work where transformers cannot be imported, as in another engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kamera.window import keep_kv

WORK = '''
import sys

class Refuses:
    """An import of a model class is an error, whoever asks."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Refuses())

import torch
import kamera.ops, kamera.store, kamera.patches, kamera.engines, kamera.window
from kamera.engines import Recipe, Recognised, match, read_anchor, read_part
from kamera.patches import Catalogue, Losses
from kamera.store import ChunkStore
from kamera.window.plan import plan

place, text = sys.argv[1:]
recipe = Recipe.from_json(open(text).read())
with ChunkStore.open(place) as store:
    parts = [read_part(store, part) for part in recipe.parts]
    assert read_anchor(store, recipe).tokens == len(recipe.anchor_ids)
    assert [patch is not None for _, patch in parts] == [part.patch is not None for part in recipe.parts]
    known = Recognised(recipe.context, store.ls("canonical", context=recipe.context))
    found = match(recipe.ids, [], known, len(recipe.anchor_ids))
    assert [m.row.chunk_id for m in found] == [part.chunk_id for part in recipe.parts]
    rows = Catalogue(store, recipe.context, None, Losses())
    last = recipe.parts[-1]
    assert rows.has_canonical(last.chunk_id)
    assert rows.patch(last.chunk_id, last.patch.antecedents, "exact") is not None
assert not any(name.partition(".")[0] == "transformers" for name in sys.modules)
print("all of it")
'''


def test_what_an_engine_needs_of_kamera_needs_no_transformers(tmp_path):
    from kamera import ChunkStore, ReusePolicy
    from tests.models import samples, tiny
    from tests.window.rig import FULL_RANK, make

    backbone = tiny.backbone("deepseek_v3")
    texts = [backbone.chunk_from_tensors(samples.text_ids(9, seed=seed)) for seed in range(2)]
    with ChunkStore.open(tmp_path / "store") as store:
        window = make(backbone, store, *texts, policy=ReusePolicy(rank=FULL_RANK, forms="always"))
        window.slide(2)
        for chunk in texts:
            window.recall(chunk.id)
        recipe = keep_kv(window)
        assert recipe.missing == () and recipe.parts[-1].patch is not None
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    where = [str(tmp_path / "store"), str(tmp_path / "recipe.json")]
    top = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", WORK, *where], cwd=top, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "all of it"
