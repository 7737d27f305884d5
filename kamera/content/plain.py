"""Untrusted text to tokens: its words never end a turn and never become a picture's placeholder.

Captions, tool results and questions hold text from cameras, web pages and users. A tokenizer reads
"<|im_start|>" in them as the token that opens a turn. Such text is tokenised separately, without the
guarded tokens; an unused special token replaces it while the chat template is rendered and tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kamera.content.chunk import TOKEN_TYPES
from kamera.content.exclusive import exclusive_of
from kamera.errors import UnsafeText, quote
from kamera.forks import lazy


class PlainText:
    """Tokenises untrusted text for one tokenizer.

    ``guards`` are the ids that text must not give: special tokens, media placeholders, and the added
    tokens of ``wrapping`` (the chat template's own text around a user's message).
    """

    def __init__(self, tokenizer: Any, media: Sequence[int | None], wrapping: Callable[[], str]) -> None:
        self._tokenizer = tokenizer
        self._media = {token for token in media if token is not None}
        self._wrapping = wrapping
        # a fast tokenizer called by two threads at once raises "Already borrowed"
        self._exclusive = exclusive_of(tokenizer)

    @lazy
    def guards(self) -> dict[int, str]:
        """Guarded ids and their spelling."""
        words = self._tokenizer
        tokens = {int(i): token for i, token in getattr(words, "added_tokens_decoder", {}).items()}
        special = {i for i, token in tokens.items() if token.special} | set(words.all_special_ids)
        wrapping = set(self.tokens(self._wrapping())) & tokens.keys()
        ids = (special | self._media | wrapping) - {words.unk_token_id, None}
        return {i: str(words.convert_ids_to_tokens(i)) for i in sorted(ids)}

    def tokens(self, text: str, **options: Any) -> list[int]:
        """Ids of trusted text: special tokens in it count."""
        if not text:
            return []
        with self._exclusive:
            return list(self._tokenizer(text, **{"add_special_tokens": False, **options})["input_ids"])

    def is_plain(self, text: str) -> bool:
        """True if the tokenizer reads no part of ``text`` as a guarded token."""
        return self.guards.keys().isdisjoint(self.tokens(text))

    def escape(self, text: str) -> list[int]:
        """Ids of ``text``, none of them guarded. Raises UnsafeText if the tokenizer has no such ids."""
        ids = self.tokens(text, split_special_tokens=True)
        if not self.guards.keys().isdisjoint(ids):
            ids = [i for piece in self._pieces(text) for i in self.tokens(piece, split_special_tokens=True)]
        words = [self.guards[i] for i in ids if i in self.guards]
        if words:
            raise UnsafeText(
                f"the text {quote(text)} spells the special token {quote(words[0])}, which this tokenizer "
                "cannot write as text: take it out"
            )
        return ids

    def unused_special_token(self, written: str) -> str:
        """A special token that ``written`` does not use. Raises UnsafeText without one."""
        with self._exclusive:
            own = set(self._tokenizer("")["input_ids"])  # tokens that the tokenizer adds by itself
        tokens = getattr(self._tokenizer, "added_tokens_decoder", {})
        for i, word in self.guards.items():
            token = tokens.get(i)
            eats = token is not None and (token.lstrip or token.rstrip)
            spare = i not in own and i not in self._media and not eats and word not in written
            if spare and self.tokens(word) == [i]:
                return word
        raise UnsafeText("a text spells special tokens, and this tokenizer has none to spare: take them out")

    def splice(
        self, ids: torch.Tensor, word: str, texts: Sequence[str], inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``ids`` ``[tokens]`` with ``texts`` in the places of ``word``, and ``inputs`` to match."""
        (stand_in,) = self.tokens(word)
        places = (ids == stand_in).nonzero().flatten().tolist()
        if len(places) != len(texts):
            raise UnsafeText(f"the chat template keeps {len(places)} of {len(texts)} texts: take {word} out")
        pieces, kinds, start = [], [], 0
        for place, text in zip(places, texts, strict=True):
            plain = torch.tensor(self.escape(text), dtype=ids.dtype)
            pieces += [ids[start:place], plain]
            kinds += [torch.arange(start, place), torch.full_like(plain, -1)]
            start = place + 1
        source = torch.cat([*kinds, torch.arange(start, len(ids))])
        out = dict(inputs)
        for name in TOKEN_TYPES:
            if name in out:
                old = torch.as_tensor(out[name]).reshape(-1)
                out[name] = torch.where(source < 0, 0, old[source.clamp_min(0)])
        return torch.cat([*pieces, ids[start:]]), out

    def _pieces(self, text: str) -> list[str]:
        """``text`` cut inside of every guarded word."""
        words = sorted(self.guards.values(), key=len, reverse=True)
        cuts = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, words)), text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]
