"""A video agent with a small window: watch a long clip, recall earlier frames, answer.

    python examples/video_agent.py
    python examples/video_agent.py --model Qwen/Qwen2.5-VL-7B-Instruct --video clip.mp4 \
        --question "What was on the desk?" --look-back 3

Without options it renders a clip of the synthetic world, and runs on the backbone that ships with Kamera.
"""

import argparse
import tempfile
from pathlib import Path

from kamera import Backbone, ChunkStore, KameraWindow, read_video, testbed


def film() -> tuple[list, list[str], str, str, list[int]]:
    """A clip of the synthetic world: frames, captions, a question, its answer, frames to recall."""
    episode = testbed.World(seed=31).episode(0, layout="LIPPLPPP")
    question = [q for q in episode.questions if q.bound][1]  # decided by frames that have left
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        testbed.render_video(episode.frames, path)
        frames = testbed.read_frames(path)
    captions = [frame.caption for frame in episode.frames]
    return frames, captions, question.text, question.answer, list(question.frames)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model directory or hub name (default: the shipped backbone)")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--video", type=Path, help="a video file (needs --question)")
    parser.add_argument("--fps", type=float, default=1.0, help="frames per second to watch")
    parser.add_argument("--question")
    parser.add_argument(
        "--look-back", type=int, nargs="*", default=[0], help="frames to recall before answering"
    )
    parser.add_argument(
        "--max-tokens", type=int, help="size of the window (default: about a third of the clip)"
    )
    parser.add_argument("--store", default="memory://", help="where frames are archived")
    args = parser.parse_args()
    if (args.video is None) != (args.question is None):
        parser.error("give --video and --question together, or neither")

    backbone = Backbone.from_pretrained(args.model or "testbed", device=args.device, dtype=args.dtype)
    if args.video:
        frames = list(read_video(args.video, fps=args.fps).frames)
        captions = [f"frame {i}\n" for i in range(len(frames))]
        question, truth, look_back = args.question, None, args.look_back
    else:
        frames, captions, question, truth, look_back = film()

    chunks = [
        backbone.chunk([{"type": "image", "image": frame}, {"type": "text", "text": caption}])
        for frame, caption in zip(frames, captions, strict=True)
    ]
    system = None if args.model else testbed.SYSTEM
    total = sum(chunk.num_tokens for chunk in chunks)
    largest = max(chunk.num_tokens for chunk in chunks)
    # a part of the clip fits, so that early frames have slid out before the question
    room = args.max_tokens or 64 + total // 4 + largest
    window = KameraWindow(backbone, ChunkStore.open(args.store), system, max_tokens=room)

    print(f"watching {len(chunks)} frames of {total} tokens through {room}")
    for number, chunk in enumerate(chunks):
        report = window.append(chunk)
        left = f", {len(report.evicted)} left" if report.evicted else ""
        print(f"  frame {number}: {report.slot.length} tokens, {report.slot.guarantee}{left}")

    window.flush()  # the agent acts, and the background work is done
    print(f"{question}  ->  {window.generate(question, max_new_tokens=16)!r} with what is in view")
    for time in ("first", "second"):
        branch = window.fork()  # looks back, and leaves the window as it is
        for number in look_back:
            report = branch.recall(chunks[number].id)
            print(
                f"  {time} look back at frame {number}: {report.forwards} forwards, "
                f"{report.vision_encodes} vision encodes, {report.slot.guarantee}"
            )
        answer = branch.generate(question, max_new_tokens=16)
        print(f"{question}  ->  {answer!r} after looking back" + (f" (truth: {truth!r})" if truth else ""))
        branch.flush()
    print("window:", ", ".join(f"{slot.label.strip()} ({slot.guarantee})" for slot in window.slots))
    print(f"all model work: {window.usage()}")


if __name__ == "__main__":
    main()
