"""Which of two references an arm follows, item by item."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kamera.certify import kl


@dataclass
class Judge:
    """Answers of one arm beside those of the full context and of a re-prefill of the edited prompt."""

    same_full: list[bool] = field(default_factory=list)
    same_new: list[bool] = field(default_factory=list)
    apart: list[bool] = field(default_factory=list)
    kl_full: list[float] = field(default_factory=list)
    kl_new: list[float] = field(default_factory=list)
    worst: float = 0.0

    def see(self, logits: torch.Tensor, full: torch.Tensor, new: torch.Tensor) -> None:
        """One item: logits ``[vocabulary]`` of the arm, the full context and the re-prefill."""
        said, before, after = int(logits.argmax()), int(full.argmax()), int(new.argmax())
        self.same_full.append(said == before)
        self.same_new.append(said == after)
        self.apart.append(before != after)
        self.kl_full.append(kl(logits.float(), full))
        self.kl_new.append(kl(logits.float(), new))
        self.worst = max(self.worst, float((logits - new).norm() / new.norm()))

    @classmethod
    def joined(cls, parts: Iterable[Judge]) -> Judge:
        """The items of several."""
        whole = cls()
        for part in parts:
            for name in ("same_full", "same_new", "apart", "kl_full", "kl_new"):
                getattr(whole, name).extend(getattr(part, name))
            whole.worst = max(whole.worst, part.worst)
        return whole

    def summary(self) -> dict[str, Any]:
        """Shares over all items, and over those on which the references disagree."""
        where = [i for i, apart in enumerate(self.apart) if apart]
        both = [(self.same_full[i], self.same_new[i]) for i in where]
        return {
            "n": len(self.apart),
            "references disagree": len(where),
            "answers as full": _share(self.same_full),
            "answers as re-prefill": _share(self.same_new),
            "of these, as full": _share([a for a, _ in both]),
            "of these, as re-prefill": _share([b for _, b in both]),
            "of these, as neither": _share([not a and not b for a, b in both]),
            "KL to full": _mean(self.kl_full),
            "KL to re-prefill": _mean(self.kl_new),
            "largest difference to re-prefill": self.worst,
        }


def _share(found: Sequence[bool]) -> float | None:
    return round(sum(found) / len(found), 4) if found else None


def _mean(found: Sequence[float]) -> float | None:
    return round(sum(found) / len(found), 4) if found else None
