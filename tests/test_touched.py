"""The tests that a change touches: what imports it, through doors and names in quotes, and nothing else."""

from __future__ import annotations

import subprocess

import pytest

from tests import costs, touched


@pytest.fixture(scope="module", autouse=True)
def one_graph():
    """The graph is built once for all of these tests."""
    graph = touched._graph()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(touched, "_graph", lambda: graph)
        yield


@pytest.mark.slow
def test_a_module_touches_the_tests_that_import_it_through_others():
    found = touched.touched(["kamera/patches/former.py"])
    assert {"tests/patches/test_former.py", "tests/window/test_policy.py"} <= set(found)
    assert not {"tests/ops/test_rope.py", "tests/content/test_chunks.py", "tests/store/test_keys.py"} & set(
        found
    )


def test_a_name_of_the_front_door_stands_for_its_room_alone():
    found = touched.touched(["kamera/sessions/pool.py"])
    assert "tests/sessions/test_pool.py" in found
    assert not {
        "tests/store/test_keys.py",
        "tests/store/test_provenance.py",
        "tests/ops/test_patch.py",
    } & set(found)


def test_a_module_that_is_named_in_quotes_touches_whoever_names_it():
    assert "tests/cli/test_app.py" in touched.touched(["kamera/cli/store_keep.py"])


def test_the_laboratory_touches_no_test_of_the_product_but_those_that_use_it():
    found = touched.touched(["lab/paper/draw.py"])
    assert {"tests/lab/paper/test_draw.py", "tests/window/test_proofs.py"} <= set(found)
    assert not [name for name in found if name.startswith(("tests/ops/", "tests/store/", "tests/cli/"))]


def test_a_test_touches_itself_and_a_conftest_all_below_it():
    own = {"tests/store/test_keys.py", "tests/test_house.py"}
    assert set(touched.touched(["tests/store/test_keys.py"])) == own
    below = set(touched.touched(["tests/store/conftest.py"]))
    assert {"tests/store/test_keys.py", "tests/store/disk/test_index.py"} <= below
    assert "tests/ops/test_rope.py" not in below


def test_a_file_that_is_no_module_touches_the_tests_that_name_it():
    assert "tests/test_pages.py" in touched.touched(["README.md"])
    assert len(touched.touched(["LICENSE"])) < 10


def test_what_is_set_for_all_touches_every_test_and_nothing_touches_none():
    every = touched.touched(["pyproject.toml"])
    files = {path.relative_to(touched.TOP).as_posix() for path in touched.TOP.glob("tests/**/test_*.py")}
    assert set(every) == files
    assert touched.touched([]) == []


def test_changes_are_those_since_the_branch_was_left_and_new_files(tmp_path, monkeypatch):
    def git(*given: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *given], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(touched, "TOP", tmp_path)
    git("init", "-q", "-b", "main")
    for name in ("a", "b"):
        (tmp_path / name).write_text("1")
        git("add", ".")
        git("commit", "-qm", name)
    git("checkout", "-qb", "mine", "HEAD~1")
    (tmp_path / "c").write_text("1")
    git("add", ".")
    git("commit", "-qm", "c")
    (tmp_path / "new").write_text("1")
    assert touched.changes("main") == ["c", "new"], "b is the other branch's"
    assert touched.changes("HEAD") == ["new"]


# -- costs -------------------------------------------------------------------------------------


def test_every_recorded_file_is_there_and_its_costly_tests_are_worth_it():
    table = costs.table()
    assert [name for name in table if not (touched.TOP / name).exists()] == []
    assert all(seconds >= costs.COSTLY for cost in table.values() for seconds in cost.costly.values())


def test_costs_are_summed_by_file_and_the_dearest_case_makes_a_test_costly(tmp_path, monkeypatch):
    there = tmp_path / "tests"
    there.mkdir()
    for name in ("test_a.py", "test_b.py"):
        (there / name).touch()
    monkeypatch.setattr(costs, "TABLE", there / "costs.json")
    (there / "costs.json").write_text('{"tests/test_b.py": [9.0, {}], "tests/test_gone.py": [1.0, {}]}')
    costs.write(
        {
            "tests/test_a.py::test_one[x]": 0.5,
            "tests/test_a.py::test_one[y]": 2.5,
            "tests/test_a.py::test_two": 1.0,
        }
    )
    assert costs.table() == {"tests/test_a.py": (4.0, {"test_one": 2.5}), "tests/test_b.py": (9.0, {})}
