"""Text to tokens: trusted text with its special tokens, and untrusted text without.

Captions, tool results and questions hold text from cameras, web pages and users: its words never end a turn
and never become a picture's placeholder. A tokenizer reads "<|im_start|>" in them as the token that opens a
turn. A conversation refuses such text; a window tokenises it separately, without the guarded tokens, while an
unused special token stands for it in the rendered chat template. Calls of a tokenizer that threads cannot
share come one by one.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kamera import forks
from kamera.content.chunk import TOKEN_TYPES
from kamera.errors import UnsafeText, quote
from kamera.forks import lazy

_making = forks.Lock()
_locks: weakref.WeakKeyDictionary[Any, forks.Lock] = weakref.WeakKeyDictionary()


def exclusive_of(thing: Any) -> forks.Lock:
    """The lock of a model or a processor, shared by all of its backbones."""
    with _making:
        try:
            return _locks.setdefault(thing, forks.Lock())
        except TypeError:  # neither hashable nor weakly referable: its lock cannot be shared
            return forks.Lock()


Offsets = list[tuple[int, int]]
"""Characters ``[start, stop)`` of each token."""


def encode(tokenizer: Any, text: str, *, special: bool = False) -> tuple[list[int], Offsets | None]:
    """Ids of trusted text, and its tokens' characters if the tokenizer tells them.

    ``special`` lets the tokenizer add its own tokens. A fast tokenizer that neither truncates nor pads is
    called below transformers, whose calls write settings into it: threads need not wait for each other.
    """
    backend = _backend(tokenizer)
    if backend is not None:
        encoding = backend.encode(text, add_special_tokens=special)
        return encoding.ids, encoding.offsets
    with exclusive_of(tokenizer):  # called by two threads at once, a fast one raises "Already borrowed"
        tells = bool(getattr(tokenizer, "is_fast", False))
        made = tokenizer(
            text, add_special_tokens=special, **({"return_offsets_mapping": True} if tells else {})
        )
    return list(made["input_ids"]), [*made["offset_mapping"]] if tells else None


def hold_tokenizer(tokenizer: Any) -> AbstractContextManager[None]:
    """Context of calls that use a tokenizer; those of one whose settings they may change come one by one."""
    return exclusive_of(tokenizer) if _backend(tokenizer) is None else nullcontext()


def _backend(tokenizer: Any) -> Any | None:
    """What a fast tokenizer calls, which threads may share, if no setting of it has to change for that."""
    from transformers import PreTrainedTokenizerFast

    stock = isinstance(tokenizer, PreTrainedTokenizerFast)
    if not stock or type(tokenizer)._encode_plus is not PreTrainedTokenizerFast._encode_plus:
        return None
    backend = tokenizer.backend_tokenizer
    settings = backend.truncation, backend.padding, backend.encode_special_tokens
    return backend if settings == (None, None, False) and not tokenizer.split_special_tokens else None


class PlainText:
    """Tokenises untrusted text for one tokenizer.

    ``guards`` are the ids that text must not give: special tokens, media placeholders, and the added
    tokens of ``wrapping`` (the chat template's own text around a user's message).
    """

    def __init__(self, tokenizer: Any, media: Sequence[int | None], wrapping: Callable[[], str]) -> None:
        self._tokenizer = tokenizer
        self._media = {token for token in media if token is not None}
        self._wrapping = wrapping

    @lazy
    def guards(self) -> dict[int, str]:
        """Guarded ids and their spelling."""
        words = self._tokenizer
        tokens = {int(i): token for i, token in getattr(words, "added_tokens_decoder", {}).items()}
        special = {i for i, token in tokens.items() if token.special} | set(words.all_special_ids)
        wrapping = set(self.tokens(self._wrapping())) & tokens.keys()
        ids = (special | self._media | wrapping) - {words.unk_token_id, None}
        return {i: str(words.convert_ids_to_tokens(i)) for i in sorted(ids)}

    @lazy
    def words(self) -> re.Pattern[str] | None:
        """Finds guarded words; None if text may give a guarded token in which no such word is."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        as_written = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", "") is None
        whole = all(i in added and (as_written or not added[i].normalized) for i in self.guards)
        words = sorted(map(re.escape, self.guards.values()), key=len, reverse=True)
        return re.compile("|".join(words)) if whole and words else None

    def tokens(self, text: str) -> list[int]:
        """Ids of trusted text: special tokens in it count."""
        return encode(self._tokenizer, text)[0] if text else []

    def is_plain(self, text: str) -> bool:
        """True if the tokenizer reads no part of ``text`` as a guarded token."""
        if self.words is not None and not self.words.search(text):
            return True
        return self.guards.keys().isdisjoint(self.tokens(text))

    def spelt(self, text: str) -> list[str]:
        """The guarded words of a trusted text, in order."""
        if self.words is not None:
            return self.words.findall(text)
        return [self.guards[i] for i in self.tokens(text) if i in self.guards]

    def escape(self, text: str) -> list[int]:
        """Ids of ``text``, none of them guarded. Raises UnsafeText if the tokenizer has no such ids."""
        ids = self._split(text)
        if not self.guards.keys().isdisjoint(ids):
            ids = [i for piece in self._pieces(text) for i in self._split(piece)]
        words = [self.guards[i] for i in ids if i in self.guards]
        if words:
            raise UnsafeText(
                f"the text {quote(text)} spells the special token {quote(words[0])}, which this tokenizer "
                "cannot write as text: take it out"
            )
        return ids

    def unused_special_token(self, written: str) -> str:
        """A special token that ``written`` does not use. Raises UnsafeText without one."""
        own = set(encode(self._tokenizer, "", special=True)[0])  # tokens that the tokenizer adds by itself
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

    @lazy
    def _own(self) -> Any:
        """A copy that splits special tokens: the setting would reach other threads' calls."""
        return copy.deepcopy(self._tokenizer)

    def _split(self, text: str) -> list[int]:
        with exclusive_of(self._tokenizer):
            return list(self._own(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _pieces(self, text: str) -> list[str]:
        """``text`` cut inside of every guarded word."""
        words = sorted(self.guards.values(), key=len, reverse=True)
        cuts = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, words)), text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]
