"""Bytes of a chunk's KV, from the shapes in a model's config.json; no weights are loaded.

python examples/size_a_store.py                          # a table of public models
python examples/size_a_store.py --model DIR_OR_HUB_NAME  # one more, from its own config
python examples/size_a_store.py --tokens 400 --chunks 100000 --patches 3
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import transformers
from transformers import AutoConfig, PretrainedConfig

PATCH_SHARE = 0.12  # ReusePolicy.patch_bytes: at most this share of the chunk's KV


@dataclass(frozen=True)
class Shapes:
    """Shapes of a language model that determine bytes; ``deepstack``: layers that add vision features."""

    name: str
    layers: int
    hidden: int
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0  # MLA: kv_lora_rank
    rotary: int = 0  # MLA: qk_rope_head_dim
    indexer: int = 0  # DSA: index_head_dim
    deepstack: int = 0

    @property
    def family(self) -> str:
        """Family of its attention."""
        if self.latent:
            return "MLA + DSA" if self.indexer else "MLA"
        return "GQA" if self.kv_heads * self.head_dim < self.hidden else "MHA"

    def kv(self, element: int = 2) -> int:
        """KV bytes per token, at ``element`` bytes per number."""
        per_layer = (
            self.latent + self.rotary + self.indexer if self.latent else 2 * self.kv_heads * self.head_dim
        )
        return element * self.layers * per_layer

    def embeds(self, element: int = 2) -> int:
        """Bytes per token of the encoding of a chunk with pictures."""
        return element * self.hidden * (1 + self.deepstack)


def shapes_of(config: PretrainedConfig, name: str) -> Shapes:
    """The shapes of a config."""
    text = config.get_text_config()
    deepstack = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    if getattr(text, "kv_lora_rank", None):
        return Shapes(
            name,
            text.num_hidden_layers,
            text.hidden_size,
            latent=text.kv_lora_rank,
            rotary=text.qk_rope_head_dim,
            indexer=getattr(text, "index_head_dim", None) or 0,
            deepstack=len(deepstack),
        )
    heads = text.num_attention_heads
    return Shapes(
        name,
        text.num_hidden_layers,
        text.hidden_size,
        getattr(text, "num_key_value_heads", None) or heads,
        getattr(text, "head_dim", None) or text.hidden_size // heads,
        deepstack=len(deepstack),
    )


PUBLISHED = (
    Shapes("Qwen/Qwen2.5-VL-3B-Instruct", layers=36, hidden=2048, kv_heads=2, head_dim=128),
    Shapes("Qwen/Qwen2.5-VL-7B-Instruct", layers=28, hidden=3584, kv_heads=4, head_dim=128),
    Shapes("Qwen/Qwen3-VL-8B-Instruct", layers=36, hidden=4096, kv_heads=8, head_dim=128, deepstack=3),
    Shapes("moonshotai/Kimi-VL-A3B-Instruct", layers=27, hidden=2048, latent=512, rotary=64),
    Shapes("llava-hf/llava-1.5-7b-hf", layers=32, hidden=4096, kv_heads=32, head_dim=128),
)
"""Shapes from the models' own config.json."""


def public() -> list[Shapes]:
    """Published models, and those described by transformers' default configurations."""
    made = {
        "Qwen/Qwen2.5-VL-72B-Instruct": transformers.Qwen2_5_VLConfig(),
        "deepseek-ai/DeepSeek-V3": transformers.DeepseekV3Config(),
        "deepseek-ai/DeepSeek-V3.2": transformers.DeepseekV32Config(),
    }
    return [*PUBLISHED, *(shapes_of(config, name) for name, config in made.items())]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a directory with a config.json, or a hub name")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--patches", type=float, default=2, help="patches of a chunk, on average")
    asked = parser.parse_args()
    rows = [shapes_of(AutoConfig.from_pretrained(asked.model), asked.model)] if asked.model else public()
    print(f"{'model':32} {'family':10} {'KV B/token':>10} {'inputs B/token':>14} {'chunk':>10} {'store':>10}")
    for row in rows:
        chunk = asked.tokens * (row.kv() + row.embeds() + asked.patches * PATCH_SHARE * row.kv())
        print(
            f"{row.name:32} {row.family:10} {row.kv():>10} {row.embeds():>14} "
            f"{chunk / 2**20:>6.1f} MiB {asked.chunks * chunk / 2**30:>6.0f} GiB"
        )
    print(
        f"16-bit numbers; a chunk of {asked.tokens} tokens with {asked.patches:g} patches of at most "
        f"{PATCH_SHARE:.0%} of its KV; a store of {asked.chunks} chunks"
    )


if __name__ == "__main__":
    main()
