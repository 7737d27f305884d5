"""A tree search over crops of one picture by forks of a window; the best branch is committed.

    python examples/zoom.py
    python examples/zoom.py --grid 3 --depth 3
    python examples/zoom.py --model Qwen/Qwen2.5-VL-7B-Instruct --picture desk.jpg --question "What is on it?"

A branch is the picture and the crops (cells of a grid) that were appended after it. Each step forks the most
certain branches and appends one more crop to each fork, so the common part of branches runs once. The bill is
compared with that of encoding and prefilling every branch anew. Without options it searches a picture made of
four frames of the synthetic world, on the backbone that ships with Kamera.
"""

import argparse
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

from PIL import Image

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines import Spent, Usage

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Branch:
    """Crops that were looked at, in order, the window that holds them, and how certain its answer is."""

    boxes: tuple[Box, ...]
    window: KameraWindow
    certainty: float


def mosaic() -> tuple[Image.Image, str, str]:
    """Four frames in one picture, a question about two of them, and its answer."""
    episode = testbed.World(seed=14).episode(0, layout="LIPP")
    question = next(question for question in episode.questions if question.bound)
    frames = [episode.frames[i].image for i in (2, 0, 1, 3)]
    width, height = frames[0].size
    picture = Image.new("RGB", (2 * width, 2 * height))
    for place, frame in enumerate(frames):
        picture.paste(frame, (place % 2 * width, place // 2 * height))
    return picture, question.text, question.answer


def cells(width: int, height: int, grid: int) -> list[Box]:
    """A picture of this size cut into ``grid`` columns and rows."""
    xs, ys = ([size * i // grid for i in range(grid + 1)] for size in (width, height))
    return [(left, top, right, bottom) for top, bottom in pairwise(ys) for left, right in pairwise(xs)]


def certainty(window: KameraWindow, question: str) -> float:
    """The probability of the most likely first token of an answer."""
    return window.next_token_logits(question).float().softmax(-1).max().item()


def spent(windows: list[KameraWindow]) -> Usage:
    """All model work of windows and their forks; each fork has an account of its own."""
    for window in windows:
        window.flush()
    now, later = zip(*(window.usage() for window in windows), strict=True)
    return Usage(reduce(Spent.plus, now), reduce(Spent.plus, later))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model directory or hub name (default: the shipped backbone)")
    parser.add_argument("--device")
    parser.add_argument("--picture", help="a picture file (needs --question)")
    parser.add_argument("--question")
    parser.add_argument("--grid", type=int, default=2, help="columns and rows that the picture is cut into")
    parser.add_argument("--depth", type=int, default=2, help="crops on a branch")
    parser.add_argument("--width", type=int, default=2, help="branches that each step goes on from")
    args = parser.parse_args()
    if (args.picture is None) != (args.question is None):
        parser.error("give --picture and --question together, or neither")

    backbone = Backbone.from_pretrained(args.model or "testbed", device=args.device)
    if args.picture:
        picture, question, truth = Image.open(args.picture).convert("RGB"), args.question, None
    else:
        picture, question, truth = mosaic()
    width, height = picture.size
    boxes = cells(width, height, args.grid)
    view = (width // args.grid, height // args.grid)  # every look has the size of a crop
    system = None if args.model else testbed.SYSTEM

    def look(box: Box) -> Image.Image:
        return picture.crop(box).resize(view)

    def start() -> KameraWindow:
        # "exact" forms nothing: a fork's new crop is one forward
        return KameraWindow(
            backbone, ChunkStore.open("memory://"), system, policy=ReusePolicy(minimum="exact")
        )

    whole = (0, 0, width, height)
    window = start()
    window.append(look(whole))
    leaves = [Branch((), window, 0.0)]
    windows, searched = [window], list[Branch]()
    for _ in range(args.depth):
        grown = list[Branch]()
        for branch in leaves:
            for box in [box for box in boxes if box not in branch.boxes]:
                fork = branch.window.fork()
                fork.append(look(box))
                grown.append(Branch((*branch.boxes, box), fork, certainty(fork, question)))
        windows += [branch.window for branch in grown]
        searched += grown
        leaves = sorted(grown, key=lambda branch: -branch.certainty)[: args.width]
    best = max(searched, key=lambda branch: branch.certainty)
    for branch in sorted(searched, key=lambda branch: -branch.certainty)[:5]:
        print(f"  {branch.certainty:.3f}  {' then '.join(map(str, branch.boxes))}")
    window = best.window  # the committed branch; the others are dropped
    bill = spent(windows)
    answer = window.generate(question, max_new_tokens=8)
    print(f"{question}  ->  {answer!r}" + (f" (truth: {truth!r})" if truth else ""))

    anew = list[KameraWindow]()
    for branch in searched:
        anew.append(start())
        for box in (whole, *branch.boxes):
            anew[-1].append(look(box))
        certainty(anew[-1], question)
    again = spent(anew)
    print(f"{len(searched)} branches: {'encodes':>10} {'forwards':>9} {'tokens':>8}")
    for name, usage in (("forked", bill), ("each anew", again)):
        work = usage.now
        print(f"{name:>12}: {work.vision_encodes:>10} {work.forwards:>9} {work.tokens:>8}")
    print(f"all model work of the search: {bill}")


if __name__ == "__main__":
    main()
