"""A decoder no library knows: what Kamera meets when a user brings a model of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast


class UnknownConfig(PretrainedConfig):
    """Settings of the model, and three ways to make it impossible to relocate."""

    model_type = "unknown_to_every_library"

    def __init__(
        self, absolute: bool = False, decaying_values: bool = False, angle_scale: float = 1.0, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.vocab_size, self.hidden_size, self.head_dim = 160, 64, 16
        self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads = 3, 4, 2
        self.absolute, self.decaying_values, self.angle_scale = absolute, decaying_values, angle_scale


class GeometricPhase(nn.Module):
    """A rotary module with frequencies of its own making, interleaved pairs."""

    inv_freq: torch.Tensor

    def __init__(self, rotary_dim: int) -> None:
        super().__init__()
        steps = torch.arange(rotary_dim // 2, dtype=torch.float32)
        self.register_buffer("inv_freq", 0.5 * 0.31**steps, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (position_ids[..., None].float() * self.inv_freq).repeat_interleave(2, -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    other = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * cos[:, None] + other * sin[:, None]


class _Layer(nn.Module):
    def __init__(self, config: UnknownConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        width = config.num_key_value_heads * config.head_dim
        self.q = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim)
        self.k = nn.Linear(config.hidden_size, width)
        self.v = nn.Linear(config.hidden_size, width)
        self.o = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        self.up = nn.Linear(config.hidden_size, 96)
        self.down = nn.Linear(96, config.hidden_size)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        h = nn.functional.layer_norm(x, x.shape[-1:])
        q, k, v = _turn(heads(self.q(h)), cos, sin), _turn(heads(self.k(h)), cos, sin), heads(self.v(h))
        if self.config.decaying_values:
            v = v * 0.999 ** at[:, None, :, None].to(v.dtype)
        k, v = cache.update(k, v, self.index)
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) / self.config.head_dim**0.5
        new, total = scores.shape[-2:]
        future = torch.ones(new, total, dtype=torch.bool).triu(total - new + 1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(torch.relu(self.up(nn.functional.layer_norm(x, x.shape[-1:]))))


class _Decoder(nn.Module):
    def __init__(self, config: UnknownConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(4096, config.hidden_size) if config.absolute else None
        self.rotary_emb = GeometricPhase(config.head_dim)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_hidden_layers))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = DynamicCache() if past_key_values is None else past_key_values
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None] + cache.get_seq_length()
        if self.places is not None:
            x = x + self.places(position_ids)
        cos, sin = self.rotary_emb(x, position_ids * self.config.angle_scale)
        for layer in self.layers:
            x = layer(x, cos, sin, position_ids, cache)
        return x


class UnknownForCausalLM(nn.Module):
    """Decoder and head; not a `PreTrainedModel`."""

    def __init__(self, config: UnknownConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embed_tokens

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        logits_to_keep: int = 0,
        **rest: Any,
    ) -> CausalLMOutputWithPast:
        cache = DynamicCache() if past_key_values is None else past_key_values
        hidden = self.model(input_ids, position_ids=position_ids, past_key_values=cache, **rest)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]), past_key_values=cache)
