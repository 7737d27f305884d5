"""Pages of text on SmolLM2: an agent reads twelve, keeps three, looks back, and is asked what they say."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kamera.engines.hf import Backbone, HfEngine
from kamera.eval.demo import Demo
from kamera.eval.walk import Ask, walk

SYSTEM = "You read the notes of a small town."

PAGES = """\
The ferry to Lindholm leaves at [nine]. It waits for the mail van, and never for tourists. In winter it
sails on Mondays only, if the ice allows it.

The key of the chapel hangs behind the [bakery]. Whoever takes it writes a name into the book beside the
door. The organ may be played until the evening bell.

The mayor's dog is called [Bruno]. He is fourteen years old and sleeps under the table when the council
meets. Nobody has heard him bark since spring.

The old bridge was built by [monks]. They carried the stones from the quarry on the hill. Two arches fell
in the flood and were put back a year later.

The best soup of the inn is made of [leeks]. The cook learned it from her aunt, who had a farm in the
valley. It is served with dark bread and a little butter.

The school garden grows mostly [pumpkins]. The children water it before lessons. In autumn the largest one
is weighed in the hall, and the winner gets a ribbon.

The clock of the tower is always late by [seven] minutes. Nobody minds, says the watchman. Travellers
set their watches by the station, which has a clock of its own.

The library lends its books for [three] weeks. More may be asked for by letter. A stamp is enough as
a fine, since the librarian collects them from all over the world.

The river is deepest near the [mill]. Swimmers are warned by a red board. The miller keeps a boat and a
long rope, and has pulled out eleven people so far.

The violin maker lives above the [pharmacy]. You can hear him try a new string in the evening. His varnish
is a secret that he will leave to his daughter.

The town band plays only [waltzes]. A march was tried once and frightened the horses. The tuba is older
than its player and has a dent from the war.

The last train brings fresh [oranges]. They come in wooden boxes from the south. The station master keeps
one on his desk until it is dry as paper.
"""
"""Twelve pages; in brackets stands what the model is asked for."""


def walk_pages(backbone: Backbone | HfEngine, *, keep: int = 3, count: int = 12) -> Iterator[str | Demo]:
    """Walk a window of ``keep`` pages over the first ``count`` of `PAGES`; yields progress, then the table.

    After each operation every page in view is asked for by its first words: a language model that has read it
    goes on with the rest of its first sentence.
    """
    questions, texts = dict[int, list[Ask]](), list[str]()
    for number, page in enumerate(PAGES.strip().split("\n\n")[:count]):
        begins, ends, rest = re.split(r" \[|\]", page.replace("\n", " "))
        texts.append(f"{begins} {ends}{rest}")
        questions[number] = [Ask(begins, backbone.engine.builder.tokenize(f"\n{begins}"), f" {ends}")]
    yield from walk(
        backbone, texts, questions, arrival="new page", keep=keep, max_new_tokens=3, system=SYSTEM
    )
