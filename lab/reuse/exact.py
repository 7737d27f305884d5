"""Random prompts through a `Reuser` that serves exact KV only, each held against an uncached run.

    python -m lab.reuse.exact [--prompts 10000] [--seconds 3600] [--output FILE]

Prompts are drawn from a pool of segments that appear, move, repeat, change by one token, and are cut: a head,
a tail, or a head with other words behind it. Three prompts in four go on from the one before. Models are tiny
and random: grouped, multi-head and latent attention.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.reuse import Prompt, Reuser
from lab.results import keep
from lab.speed.machine import commit, machine

CLOSE = 1e-4
"""The largest relative difference of fp32 logits that is no divergence."""

_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
}


def backbones() -> dict[str, HfEngine]:
    """Three tiny models of random weights, large enough that attention matters."""
    torch.manual_seed(0)
    models = {
        "gqa": LlamaForCausalLM(LlamaConfig(**_SHAPE, num_key_value_heads=2)),
        "mha": LlamaForCausalLM(LlamaConfig(**_SHAPE, num_key_value_heads=4)),
        "mla": DeepseekV3ForCausalLM(DeepseekV3Config(**_SHAPE, **_LATENT)),
    }
    for model in models.values():
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
    return {name: HfEngine(model.eval()) for name, model in models.items()}


def drawn(draw: random.Random, pool: list[list[int]], before: list[int]) -> list[int]:
    """The next prompt as indices into ``pool``, which may get a changed or cut segment."""
    order = list(before) if before and draw.random() < 0.75 else []
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(("add", "add", "drop", "swap", "change", "insert", "head", "tail", "rewrite"))
        if kind == "drop" and order:
            order.pop(draw.randrange(len(order)))
        elif kind == "swap" and len(order) > 1:
            a, b = draw.sample(range(len(order)), 2)
            order[a], order[b] = order[b], order[a]
        elif kind in ("change", "head", "tail", "rewrite") and order:
            at = draw.randrange(len(order))
            pool.append(altered(draw, pool[order[at]], kind))
            order[at] = len(pool) - 1
        else:
            order.insert(draw.randint(0, len(order)), draw.randrange(len(pool)))
    return order[:10] or [0]


def altered(draw: random.Random, ids: list[int], kind: str) -> list[int]:
    """A segment with one other token, a piece of it, or its head with other tokens behind it."""
    at = draw.randrange(len(ids))
    if kind == "head":
        return ids[: at + 1]
    if kind == "tail":
        return ids[at:]
    if kind == "rewrite":
        return [*ids[:at], *(draw.randrange(3, 256) for _ in range(draw.randint(1, 20)))]
    return [*ids[:at], draw.randrange(3, 256), *ids[at + 1 :]]


def run(backbone: HfEngine, prompts: int, seed: int, stop: float) -> dict[str, Any]:
    """Up to ``prompts`` prompts until ``stop`` (monotonic seconds): divergences, tiers, reused tokens."""
    draw = random.Random(seed)
    done, wrong, worst, sessions = 0, 0, 0.0, 0
    tiers: Counter[str] = Counter()
    while done < prompts and time.monotonic() < stop:
        reuser = Reuser(backbone, ChunkStore.open("memory://"), ReusePolicy.exact(), held=8)
        pool = [[draw.randrange(3, 256) for _ in range(draw.randint(6, 40))] for _ in range(8)]
        before: list[int] = []
        sessions += 1
        for _ in range(min(50, prompts - done)):
            before = drawn(draw, pool, before)
            ids, anchors = [5, 6, 7, 8], []
            for part in (*(pool[i] for i in before), [draw.randrange(3, 256) for _ in range(5)]):
                anchors.append(len(ids))
                ids += part
            made = reuser.prepare(Prompt.of(ids, anchors=anchors)).run()
            logits = made.window.next_token_logits(made.question)
            with torch.no_grad():
                wanted = backbone.model(input_ids=torch.tensor([ids])).logits[0, -1]
            off = float((logits - wanted).norm() / wanted.norm())
            same = bool(logits.argmax() == wanted.argmax())
            done, wrong, worst = done + 1, wrong + (off > CLOSE or not same), max(worst, off)
            for admission in made.admissions:
                head = admission.head if admission.tier == "none" else 0
                tiers[admission.tier] += admission.tokens - head
                tiers["heads of prefilled segments"] += head
    return {
        "prompts": done,
        "stores": sessions,
        "divergences": wrong,
        "worst": worst,
        "tokens by tier": dict(tiers),
    }


def main() -> None:
    """Run, print a line per family, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.exact")
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started, found = time.monotonic(), {}
    models = backbones()
    for number, (name, backbone) in enumerate(models.items()):
        stop = started + asked.seconds * (number + 1) / len(models)
        found[name] = run(backbone, -(-asked.prompts // len(models)), number, stop)
        print(name, found[name], flush=True)
    if asked.output is not None:
        document = {
            "command": f"python -m lab.reuse.exact --prompts {asked.prompts} --seconds {asked.seconds:g}",
            "commit": commit(),
            "machine": machine(),
            "close": CLOSE,
            "families": found,
        }
        keep(document, asked.output)


if __name__ == "__main__":
    main()
