"""The model without Kamera: the unsplit prompt through the processor and one ``generate``."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kamera.content import TOKEN_TYPES, Chunk
from kamera.eval.adapter import ArmQuestion, Reply, Unit
from kamera.eval.desk import Desk


class Native:
    """All units and the question are one turn, processed and prefilled at once, answered greedily.

    ``window_tokens`` and ``recomputed_tokens`` hold the question and what arrives with it: it is one turn.
    """

    rehearsed = False

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.order: tuple[str, ...] = ()

    def encode(self, unit: Unit) -> None:
        self.desk.chunk(unit)

    def place(self, order: Sequence[str]) -> None:
        self.order = tuple(order)

    def ask(self, query: ArmQuestion) -> Reply:
        """Answer the whole prompt. Units are chat content, no chunks."""
        backbone, system = self.desk.backbone, self.desk.system
        shown = [*(self.desk.units[name] for name in self.order), *query.live]
        words = [{"type": "text", "text": query.text}] if query.text else []
        contents = [unit.content for unit in shown if not isinstance(unit.content, Chunk)]
        assert len(contents) == len(shown), "the processor takes content, no chunks"
        turn = backbone.chunk([*(dict(part) for content in contents for part in content), *words])
        tail = backbone.builder.tokenize(backbone.builder.seams(system).tail)
        ids = torch.cat([backbone.builder.anchor_ids(system), turn.input_ids, tail])
        media = {name: turn.inputs[name] for name in turn.inputs if name not in TOKEN_TYPES}
        # per-token inputs are extended to the whole sequence
        whole = backbone.builder.from_tensors(ids, media, backbone.fingerprint)
        sequence = ids[None].to(backbone.model.device)
        dtype = next(p.dtype for p in backbone.model.parameters() if p.is_floating_point())
        started = time.perf_counter()
        with torch.no_grad(), backbone.turns.alone():
            made = backbone.model.generate(
                input_ids=sequence,
                attention_mask=torch.ones_like(sequence),
                **{
                    name: _argument(name, whole.inputs[name], backbone.model.device, dtype)
                    for name in whole.inputs
                },
                max_new_tokens=query.max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        seconds = time.perf_counter() - started
        text = backbone.builder.detokenize(made.sequences[0, ids.shape[0] :].cpu()) or ""
        return Reply(text, made.logits[0][0].cpu(), seconds, turn.num_tokens, 0, turn.num_tokens, 1)


def _argument(name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """An argument of the model: per-token inputs as a batch of one, pixels in the weights' dtype."""
    batched = tensor[None] if name in TOKEN_TYPES else tensor
    return batched.to(device, dtype if tensor.is_floating_point() and "pixel" in name else tensor.dtype)
