"""A radix tree finds what trying every string finds, also after strings have left."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.reuse.radix import Radix, common_head

strings = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=25)


@settings(max_examples=200, deadline=None)
@given(strings, strings, st.lists(st.integers(0, 2), max_size=12), st.integers(0, 3))
def test_a_radix_tree_equals_trying_every_string(added, removed, asked, start):
    tree, held = Radix(), dict[tuple[int, ...], int]()
    for value, string in enumerate(added):
        tree.add(ids(string).tobytes(), value)
        held[tuple(string)] = value
    for string in removed:
        if tuple(string) in held:
            tree.remove(ids(string).tobytes())
            del held[tuple(string)]
    text = ids([7] * start + asked + [7])
    found = tree.strings_along(text.tobytes(), start, start + len(asked))
    heads = {string: common_head(ids(string), ids(asked)) for string in held}
    whole = sorted((string for string in held if heads[string] == len(string)), key=len)
    assert found.values == tuple(held[string] for string in whole)
    assert found.common == max(heads.values(), default=0)
    if held:
        assert found.value in {held[s] for s, common in heads.items() if common == found.common}
    else:
        assert found.value is None and not tree._children


def ids(string: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(string, "<u4")
