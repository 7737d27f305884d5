"""A coding agent whose prompt is edited every turn: failed edits leave it, and old tool results are cleared.

    python examples/coding_agent.py
    python examples/coding_agent.py --steps 20 --keep 2 --mode forget
    python examples/coding_agent.py --model Qwen/Qwen2.5-VL-7B-Instruct --device cuda --dtype bfloat16

It reads a file, tries edits of which the first of each pair fails, and runs the tests. After each success the
failed call is dropped from the middle of the prompt, and results older than the last ones become a
placeholder. For each step it prints the tokens that Kamera kept, turned (relocated), patched and prefilled,
next to the tokens that a prefix cache would prefill for the same prompt. At the end it pins the file, and
uses scratch messages, which only one answer sees. Without --model it runs on the backbone that ships with
Kamera, which knows nothing about code: look at the tokens, not at its answers.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import takewhile

from kamera import Backbone, ChatSession, ChunkStore, ReusePolicy
from kamera.edits import policies
from kamera.window import sequence_of

WORDS = ["load", "save", "parse", "table", "index", "value", "count", "total", "limit", "buffer", "check"]


def source(draw: random.Random, functions: int) -> str:
    """A file of small functions."""
    lines = []
    for _ in range(functions):
        name, argument = draw.choice(WORDS), draw.choice(WORDS)
        lines += [f"def {name}_{draw.randrange(99)}({argument}):", f"    return {argument} + 1", ""]
    return "\n".join(lines)


def trajectory(steps: int) -> Iterator[list]:
    """The agent's history at each step, as its client keeps it."""
    draw = random.Random(1)
    history = [
        {"role": "system", "content": "You mend Python code. Answer with one edit."},
        {"role": "user", "content": "The tests fail. Mend this file.\n" + source(draw, 6)},
    ]
    for step in range(steps):
        yield list(history)
        name = "edit" if step % 3 else "read"
        call = {"id": f"call{step}", "type": "function", "function": {"name": name, "arguments": {}}}
        history.append({"role": "assistant", "content": f"{name} {step}", "tool_calls": [call]})
        failed = step % 3 == 1
        result = "Error: no such text\n" + source(draw, 1) if failed else source(draw, 6)
        history.append({"role": "tool", "tool_call_id": f"call{step}", "content": result})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model directory or hub name (default: the shipped backbone)")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--keep", type=int, default=2, help="tool results that stay in the prompt")
    parser.add_argument("--mode", choices=["auto", "amortize", "repair", "forget"], default="amortize")
    parser.add_argument("--store", default="memory://")
    args = parser.parse_args()

    backbone = Backbone.from_pretrained(args.model or "testbed", device=args.device, dtype=args.dtype)
    failed, old = policies.drop_failed_tool_calls(), policies.clear_tool_results(args.keep)

    def retention(messages: list, turn: int) -> list:
        kept = old(failed(messages, turn), turn)
        # many templates show no tool calls, and Kamera refuses what would vanish: the call stands in the text
        return [{name: value for name, value in m.items() if name != "tool_calls"} for m in kept]

    session = ChatSession(
        backbone,
        ChunkStore.open(args.store),
        mode=args.mode,
        # certified=False: this agent accepts less than exact KV; the report names the weakest guarantee.
        policy=ReusePolicy(on_miss="form" if args.mode == "repair" else "prefill"),
    )

    before: list[int] = []
    prefilled = ran = prefix = 0
    print("step  prompt    kept  turned  patched  prefilled  prefix cache")
    for step, history in enumerate(trajectory(args.steps)):
        turn = session.send(retention(history, step), max_new_tokens=4, do_sample=False)
        ids = session.prompt_ids.tolist()
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False)))
        before, report = ids, turn.report
        prefilled, prefix = prefilled + report.prefilled, prefix + len(ids) - shared
        ran += report.tokens_recomputed  # those of formed patches too, without the question's
        print(
            f"{step:>4} {len(ids):>7} {report.kept:>7} {report.turned:>7} {report.patched:>8} "
            f"{report.prefilled:>10} {len(ids) - shared:>13}  {report.guarantee}"
        )
    print(
        f"tokens prefilled for {args.steps} prompts ({ran} run before the answers, to form patches too): "
        f"Kamera {prefilled}, a prefix cache {prefix}"
    )

    note = {"role": "user", "content": "Think step by step before you answer: which function is at fault?"}
    size = len(sequence_of(session.window).input_ids)
    session.send("Which one now?", scratch=[note], max_new_tokens=4, do_sample=False)
    grown = len(sequence_of(session.window).input_ids) - size
    print(f"scratch: {len(backbone.tokenize(note['content']))} tokens seen once, window grew by {grown}")
    session.flush()
    print(f"all model work, answers included: {session.usage()}")


if __name__ == "__main__":
    main()
