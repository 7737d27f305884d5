"""Events become lanes, spans, marks and numbers: what a page shows is decided here."""

from __future__ import annotations

from dataclasses import replace

from kamera.engines import Spent, Usage
from kamera.window import Outcome
from kamera.window.view.story import lives
from tests.window.told import event, slot

NEW = Outcome("prefilled", 10, "new", media=True)
KEPT = Outcome("kept", media=True)


def walk():
    """A and b come, a leaves, c comes, a comes back by a patch."""
    a, b = slot("a", 1, 5), slot("b", 2, 15, antecedents=("a",))
    moved = replace(b, start=5, position=5, guarantee="survivor")
    c = slot("c", 3, 15, antecedents=("b",))
    back = slot("a", 4, 25, antecedents=("b", "c"), guarantee="patched", rank=4)
    patched = Outcome("patched", patch_bytes=50, media=True)
    spent = Usage(Spent(), Spent(2, 30, 0, 0.0))
    return [
        event(
            "append", [], [a], outcomes=[NEW], concerns=a, costs={"vision_encodes": 1}, pictures={"a": b"jpg"}
        ),
        event("append", [a], [a, b], outcomes=[KEPT, NEW], concerns=b),
        event("slide", [a, b], [moved], outcomes=[Outcome("moved", media=True)], concerns=a),
        event("append", [moved], [moved, c], outcomes=[KEPT, NEW], concerns=c),
        event(
            "recall", [moved, c], [moved, c, back], outcomes=[KEPT, KEPT, patched], concerns=back, usage=spent
        ),
    ]


def spans(life) -> list[tuple]:
    return [(life.lanes[s.lane].chunk_id, s.first, s.last, s.guarantee) for s in life.spans]


def test_a_lane_is_a_chunk_and_a_span_lasts_while_its_kv_is_the_same():
    (life,) = lives(walk())
    assert [lane.chunk_id for lane in life.lanes] == ["a", "b", "c"]
    assert spans(life) == [
        ("a", 0, 1, "exact"),
        ("b", 1, 1, "exact"),
        ("b", 2, 4, "survivor"),
        ("c", 3, 4, "exact"),
        ("a", 4, 4, "patched"),
    ]
    assert [deed.order for deed in life.deeds] == [(0,), (0, 1), (1,), (1, 2), (1, 2, 0)]
    assert [deed.left for deed in life.deeds] == [(), (), (0,), (), ()]


def test_each_life_has_a_prefix_cache_of_its_own_and_a_fork_begins_with_what_it_held():
    told = walk()
    again = [replace(each, window="w2") for each in told]
    first, second = lives([*told, *again])
    assert [deed.prefix for deed in first.deeds] == [deed.prefix for deed in second.deeds]
    a, b = slot("a", 1), slot("b", 2, 10)
    (fork,) = lives([event("append", [a], [a, b], window="w3")])
    assert fork.deeds[0].prefix.tokens == 10
