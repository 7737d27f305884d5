from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import chunk_id, digest, tensor_digest
from kamera.store import Context, canonical_key, patch_key
from tests.store.builders import tensors

CONTEXT = Context("backbone", "anchor", "tenant")
IDS = torch.tensor([1, 2, 3])
PIXELS = torch.arange(12, dtype=torch.float32).reshape(3, 4)
GRID = torch.tensor([[1, 2, 2]])


def test_canonical_key_is_the_one_of_format_1() -> None:
    # a change here orphans every store there is: raise the version instead
    assert canonical_key(CONTEXT, "chunk") == (
        "290bd0013456c0a6a7819867f5f52388d1c478ea0aa04db76f58e7824c70e884"
    )
    assert patch_key(CONTEXT, "chunk", ("a", "b"), "exact") == (
        "c3beee4f66e6766baffd83a9ce0fa953dfb5d86fda89b96f042ebd3e23edae22"
    )
    assert chunk_id(IDS, {"pixel_values": PIXELS, "image_grid_thw": GRID}) == (
        "0d0e03ba0227134bc0d603f434d305d52927ac34298f7d407859a282529fa3d9"
    )


@pytest.mark.parametrize("field", ["fingerprint", "anchor", "tenant"])
def test_a_change_of_each_context_field_changes_both_keys(field: str) -> None:
    other = replace(CONTEXT, **{field: "other"})
    assert canonical_key(CONTEXT, "c") != canonical_key(other, "c")
    for kind in ("exact", "orbit"):
        assert patch_key(CONTEXT, "c", ("a",), kind) != patch_key(other, "c", ("a",), kind)


def test_fields_do_not_run_into_each_other() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")
    assert digest("a", "") != digest("a")
    one, two = Context("ab", "c", ""), Context("a", "bc", "")
    assert canonical_key(one, "x") != canonical_key(two, "x")
    assert patch_key(one, "x", ("a", "b"), "exact") != patch_key(one, "x", ("ab",), "exact")
    assert patch_key(one, "x", ("a",), "exact") != patch_key(one, "xa", (), "exact")


@given(st.lists(st.text(max_size=2), max_size=4), st.lists(st.text(max_size=2), max_size=4))
def test_different_field_lists_have_different_digests(one: list[str], two: list[str]) -> None:
    assert (digest(*one) == digest(*two)) == (one == two)


def test_only_the_exact_key_depends_on_order() -> None:
    assert patch_key(CONTEXT, "c", ("a", "b"), "exact") != patch_key(CONTEXT, "c", ("b", "a"), "exact")
    assert patch_key(CONTEXT, "c", ("a", "b"), "orbit") == patch_key(CONTEXT, "c", ("b", "a"), "orbit")


@given(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3))
def test_the_kinds_of_object_never_share_a_key(chunk: str, antecedents: list[str]) -> None:
    keys = {
        canonical_key(CONTEXT, chunk),
        patch_key(CONTEXT, chunk, antecedents, "exact"),
        patch_key(CONTEXT, chunk, antecedents, "orbit"),
    }
    assert len(keys) == 3


@pytest.mark.parametrize(
    "ids, inputs",
    [
        (torch.tensor([1, 2, 4]), {"pixel_values": PIXELS, "image_grid_thw": GRID}),
        (torch.tensor([1, 3, 2]), {"pixel_values": PIXELS, "image_grid_thw": GRID}),
        (torch.tensor([1, 2]), {"pixel_values": PIXELS, "image_grid_thw": GRID}),
        (IDS, {"pixel_values": PIXELS + 1e-3, "image_grid_thw": GRID}),
        (IDS, {"pixel_values": PIXELS.double(), "image_grid_thw": GRID}),
        (IDS, {"pixel_values": PIXELS.reshape(4, 3), "image_grid_thw": GRID}),
        (IDS, {"pixel_values": PIXELS, "image_grid_thw": GRID + 1}),
        (IDS, {"pixel_values": PIXELS, "video_grid_thw": GRID}),
        (IDS, {"pixel_values": PIXELS}),
        (IDS, {}),
    ],
)
def test_another_token_or_input_is_another_chunk(ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    this = chunk_id(IDS, {"pixel_values": PIXELS, "image_grid_thw": GRID})
    assert chunk_id(ids, inputs) != this


def test_a_chunk_id_ignores_name_order_strides_and_int_width() -> None:
    this = chunk_id(IDS, {"pixel_values": PIXELS, "image_grid_thw": GRID})
    strided = PIXELS.T.contiguous().T
    assert not strided.is_contiguous()
    assert chunk_id(IDS.int(), {"image_grid_thw": GRID, "pixel_values": strided}) == this


@given(tensors(), tensors())
def test_tensor_digest_tells_dtype_shape_and_bits_apart(one: torch.Tensor, two: torch.Tensor) -> None:
    same = (one.dtype, one.shape) == (two.dtype, two.shape) and bool(
        torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))
    )
    assert (tensor_digest(one) == tensor_digest(two)) == same
    assert tensor_digest(one) == tensor_digest(one.clone())
