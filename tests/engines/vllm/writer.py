"""Writes what `test_elsewhere` reads: a model, a store, and questions behind windows with their recipes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.testbed import World
from tests.engines.vllm.engine import bound, pictures_directory

OPEN = ReusePolicy()
POLICIES = {
    "full": replace(OPEN, forms="always", rank=512, patch_bytes=None),
    "default": replace(OPEN, forms="always"),
    "blind": replace(OPEN, on_miss="blind"),
}


def write(where: Path) -> None:
    """Write into an empty folder."""
    model = pictures_directory(where / "model")
    backbone = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine
    store, tail, windows = ChunkStore.open(where / "store"), backbone.builder.seams(None).tail, []
    for number, patches in enumerate(name for name in POLICIES for _ in range(6)):
        episode, images = World(800_000).episode(number, layout="LLLI"), []
        for i, frame in enumerate(episode.frames):
            images.append(str(where / f"{number}-{i}.png"))
            frame.image.save(images[-1])
        chunks = [backbone.chunk(frame.content) for frame in episode.frames]
        for first in (True, False):  # the first window leaves what the second one is made of
            window = KameraWindow(backbone, store, policy=POLICIES[patches])
            for chunk in chunks:
                window.append(chunk)
            if first:
                window.slide(len(chunks))
                window.flush()
        asked, recipe = bound(episode)[:4], window.recipe()
        assert recipe.missing == ()
        windows.append(
            {
                "patches": patches,
                "images": images,
                "names": [slot.chunk_id for slot in window.slots],
                "recipe": recipe.to_json(),
                "length": len(recipe.ids),
                "prompts": [
                    [*recipe.ids, *backbone.builder.question_ids(q.text, tail).tolist()] for q in asked
                ],
                "answers": [question.answer for question in asked],
            }
        )
    store.close()
    (where / "asked.json").write_text(json.dumps(windows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
