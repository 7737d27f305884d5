"""Form the patches of a few frames ahead of time, then fill a window without a forward.

python examples/compile_patches.py
python examples/compile_patches.py --model Qwen/Qwen2.5-VL-3B-Instruct --images a.png b.png c.png
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.compile import Settings, read_plan, run_plan

SYSTEM = "You watch a camera."


def testbed_frames(folder: Path) -> tuple[list[list[dict[str, Any]]], str, str]:
    """Frames of the shipped synthetic world as chat content, a question about them, and its answer."""
    from kamera import testbed

    episode = testbed.World(seed=0).episode(0, legends=2, items=1)
    contents = []
    for number, frame in enumerate(episode.frames):
        frame.image.save(folder / f"{number}.png")
        contents.append([{"image": str(folder / f"{number}.png")}, {"text": frame.caption}])
    question = next(q for q in episode.questions if q.bound)  # its answer needs two frames
    return contents, question.text, question.answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a model directory or hub name (default: the shipped testbed)")
    parser.add_argument("--images", nargs="+", type=Path, metavar="FILE", help="frames, with --model")
    parser.add_argument("--question", default="What is on the last picture?", help="asked at the end")
    parser.add_argument("--rank", type=int, default=32, help="directions a patch keeps (default: 32)")
    arguments = parser.parse_args()
    if bool(arguments.model) != bool(arguments.images):
        parser.error("--model and --images go together")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.model:
            backbone = Backbone.from_pretrained(arguments.model)
            contents = [[{"image": str(image.resolve())}] for image in arguments.images]
            question, truth = arguments.question, None
        else:
            backbone = Backbone.from_pretrained("testbed")
            contents, question, truth = testbed_frames(folder)

        # A plan is JSON lines, one window each; `kamera compile MODEL plan.jsonl --store DIR` does the same.
        path = folder / "plan.jsonl"
        path.write_text(json.dumps({"system": SYSTEM, "chunks": contents}) + "\n")
        store = ChunkStore.open(folder / "store")
        report = run_plan(read_plan(path), backbone, store, Settings(rank=arguments.rank))
        print(
            f"compiled {report.chunks} chunks: {report.patches.formed} patches, {report.forwards} forwards, "
            f"{report.vision_encodes} vision encodes, {report.bytes_stored / 2**20:.1f} MiB"
        )

        # The frames now need neither the vision tower nor the decoder.
        policy = ReusePolicy(rank=arguments.rank)
        window = KameraWindow(backbone, store, SYSTEM, policy=policy)
        for content in contents:
            done = window.append(content)
            assert done.slot is not None
            print(
                f"appended {done.slot.length} tokens as {done.slot.guarantee}: {done.forwards} forwards, "
                f"{done.vision_encodes} vision encodes, {done.seconds * 1000:.0f} ms"
            )
        answer = window.generate(question, max_new_tokens=16)
        print(f"{question} {answer}" + ("" if truth is None else f" (truth: {truth})"))
        window.flush()
        print(f"all model work: to compile, {report.usage().now}; of the window, {window.usage()}")
        store.close()


if __name__ == "__main__":
    main()
