"""Look back by similarity: a frame occurs again, and the window recalls its earlier occurrence.

    python examples/look_back.py
    python examples/look_back.py --model Qwen/Qwen2.5-VL-7B-Instruct --frames desk.jpg hall.jpg desk_again.jpg

Without options it shows frames of the synthetic world; the last frame is the one that occurs again.
"""

import argparse
import io

from PIL import Image

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy, testbed


def film() -> list[Image.Image]:
    """A legend, distractors and other frames, then the legend again with the losses of another camera."""
    frames = [frame.image for frame in testbed.World(seed=31).episode(0, layout="LPPRPI").frames]
    file = io.BytesIO()
    frames[0].save(file, "JPEG", quality=85)
    return [*frames, Image.open(file).convert("RGB")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model directory or hub name (default: the shipped backbone)")
    parser.add_argument("--device")
    parser.add_argument("--frames", nargs="+", help="picture files in the order they were seen")
    parser.add_argument("--store", default="memory://", help="where frames are archived")
    args = parser.parse_args()

    backbone = Backbone.from_pretrained(args.model or "testbed", device=args.device)
    *frames, again = [Image.open(name) for name in args.frames] if args.frames else film()

    system = None if args.model else testbed.SYSTEM
    # "exact": a recalled frame is prefilled from its stored encoding
    policy = ReusePolicy(minimum="exact")
    window = KameraWindow(backbone, ChunkStore.open(args.store), system, policy=policy)
    seen = [window.append(frame).slot.chunk_id for frame in frames]
    window.slide(len(frames))  # empties the window
    for hit in window.search(again, k=3):
        print(f"frame {seen.index(hit.chunk_id)} looks like it: {hit.score:.3f}")
    report = window.recall(like=again)
    print(f"recalled frame {seen.index(report.slot.chunk_id)}: {report.vision_encodes} vision encode")
    window.flush()
    print(f"all model work: {window.usage()}")


if __name__ == "__main__":
    main()
