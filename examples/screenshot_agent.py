"""An agent that keeps its last screenshots: every step removes a picture from the middle of the prompt.

    python examples/screenshot_agent.py
    python examples/screenshot_agent.py --steps 30 --keep 3 --mode amortize
    python examples/screenshot_agent.py --steps 12 --keep 3 --mode forget --anticipate
    python examples/screenshot_agent.py --model screen-reader --dtype float32
    python examples/screenshot_agent.py --model Qwen/Qwen2.5-VL-7B-Instruct --device cuda --dtype bfloat16

For each step it prints the tokens that Kamera kept, turned (relocated), patched and prefilled, next to the
tokens that a prefix cache would prefill for the same prompt. With --anticipate the next prompt is prepared
after each answer, while the agent acts. Without --model it runs on the backbone that
ships with Kamera; the screenshots are frames of its synthetic world. With --model screen-reader they are
screens, each step asks about the newest, and the answer is printed.
"""

import argparse
from itertools import takewhile

from kamera import Backbone, ChatSession, ChunkStore, ReusePolicy, testbed
from kamera.edits import policies
from kamera.eval.screens import drawn, screens


def screenshots(count: int, model: str | None) -> list:
    """Pictures, each with a question: screens for their reader, or items frames of the synthetic world."""
    if model == "screen-reader":
        return [(drawn(things), f"\n{things[0].ask().shown}") for things in screens(min(count, 12))]
    world = testbed.World(seed=7)
    return [(world.episode(i, layout="I").frames[0].image, "") for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model directory or hub name (default: the shipped backbone)")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--keep", type=int, default=3, help="screenshots that stay in the prompt")
    parser.add_argument("--mode", choices=["amortize", "repair", "forget"], default="amortize")
    parser.add_argument("--anticipate", action="store_true", help="prepare each next prompt after the answer")
    parser.add_argument("--store", default="memory://")
    args = parser.parse_args()

    backbone = Backbone.from_pretrained(args.model or "testbed", device=args.device, dtype=args.dtype)
    session = ChatSession(
        backbone,
        ChunkStore.open(args.store),
        mode=args.mode,
        # certified=False: this agent accepts less than exact KV; the report names the weakest guarantee.
        # Patches are formed only if they are served: forming one costs a second forward.
        policy=ReusePolicy(on_miss="form" if args.mode == "repair" else "prefill"),
        edit_policy=policies.keep_last_images(args.keep),
    )

    messages = [{"role": "system", "content": "You use a computer."}]
    before: list[int] = []
    prefilled = ran = prefix = 0
    print("step  prompt    kept  turned  patched  prefilled  prefix cache")
    for step, (picture, question) in enumerate(screenshots(args.steps, args.model)):
        content = [{"type": "text", "text": f"step {step}"}, {"type": "image", "image": picture}]
        content += [{"type": "text", "text": question}] if question else []
        messages.append({"role": "user", "content": content})
        turn = session.send(messages, max_new_tokens=4, do_sample=False)
        messages.append({"role": "assistant", "content": turn.text})
        if args.anticipate:
            session.anticipate()
            session.flush()  # as if the agent acted for a while
        ids = session.prompt_ids.tolist()
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False)))
        before, report = ids, turn.report
        prefilled, prefix = prefilled + report.prefilled, prefix + len(ids) - shared
        ran += report.tokens_recomputed  # those of formed patches too, without the question's
        print(
            f"{step:>4} {len(ids):>7} {report.kept:>7} {report.turned:>7} {report.patched:>8} "
            f"{report.prefilled:>10} {len(ids) - shared:>13}  {report.guarantee}"
            + (f"{question} {turn.text}" if question else "")
        )
    print(
        f"tokens prefilled for {args.steps} prompts ({ran} run before the answers, to form patches too): "
        f"Kamera {prefilled}, a prefix cache {prefix}"
    )
    session.flush()
    print(f"all model work, answers included: {session.usage()}")


if __name__ == "__main__":
    main()
