"""Lists among named tensors come back by number, whatever order their names come in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.content import Encoded
from kamera.ops import flat_lists, whole_lists

IDS = torch.tensor([3, 4])
TWELVE = [torch.tensor([float(i)]) for i in range(12)]
VALUES = {"features": TWELVE, "mask": torch.tensor([1]), "one": [torch.tensor([7.0])]}


@given(st.permutations(list(flat_lists(VALUES))))
def test_a_list_of_twelve_is_whole_in_any_order_of_names(names: list[str]) -> None:
    flat = flat_lists(VALUES)
    whole = whole_lists({name: flat[name] for name in names})
    assert whole.keys() == VALUES.keys()
    assert torch.cat(whole["features"]).tolist() == [float(i) for i in range(12)]
    assert torch.equal(whole["mask"], VALUES["mask"])
    assert isinstance(whole["one"], list) and len(whole["one"]) == 1


@pytest.mark.parametrize(
    "names",
    [("x.0", "x.2"), ("x.1",), ("x.0", "x.00"), ("x.1", "x.01", "x.0"), ("x", "x.0")],
    ids=" ".join,
)
def test_a_list_with_a_gap_or_a_double_is_refused(names: tuple[str, ...]) -> None:
    tensors = {name: IDS for name in names}
    with pytest.raises(ValueError, match=r"^x\.\d+ is out of place: .* without gaps$"):
        whole_lists(tensors)
    with pytest.raises(ValueError, match="out of place"):
        Encoded(IDS, {}, tensors)
