"""``kamera eval mm-niah …``: benchmarks from the command line."""

import pytest

from kamera.testbed.benchmarks import write_mm_niah
from tests.cli.run import kamera

NIAH = ("eval", "mm-niah", "--bare", "--subtask", "reasoning-text", "--limit", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_mm_niah(tmp_path_factory.mktemp("data"), episodes=1, questions=2, layouts=("LI",))


def test_a_benchmark_runs_from_files_to_a_table_and_to_json(capsys, data, tmp_path):
    arms = ("--arms", "reprefill, blind,patch@16", "--data", data, "--out", tmp_path / "out")
    document = kamera(capsys, *NIAH, *arms, "--format", "json").document
    assert [arm["arm"] for arm in document["arms"]] == ["reprefill", "blind", "patch@16"]
    assert document["items"] == document["labelled"] == 2
    assert document["arms"][0]["agreement"] == 1.0
    assert document["arms"][0]["summary"]["official"] is None  # contexts of less than 1k tokens

    items = (tmp_path / "out" / "items.jsonl").read_bytes()
    again = kamera(capsys, *NIAH, *arms)
    assert again.code == 0 and (tmp_path / "out" / "items.jsonl").read_bytes() == items
    assert "2 items, 2 labelled, 0 skipped" in again.out and "patch@16" in again.out
    assert "by length and depth" in again.out
    refused = kamera(capsys, *NIAH, *arms, "--no-resume")
    assert refused.code == 2 and "already holds a run" in refused.err


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (("--arms", "reprefill,magic"), 2, "'magic' is none of reprefill, native, blind,"),
        (("--subtask", "counting-video"), 2, "no subtask 'counting-video'"),
        (("--split", "test"), 1, "no MM-NIAH annotations"),
        (("--limit", "0"), 2, "--limit"),
    ],
)
def test_bad_usage_is_one_line_and_writes_nothing(capsys, data, tmp_path, arguments, code, said):
    run = kamera(capsys, *NIAH, "--data", data, "--out", tmp_path / "out", *arguments)
    assert run.code == code and said in " ".join(run.err.split())
    assert not (tmp_path / "out" / "items.jsonl").exists()


@pytest.mark.parametrize("name", ["mm-niah", "milebench", "muirbench", "video-mme", "egoschema"])
def test_every_benchmark_explains_its_options(capsys, name):
    run = kamera(capsys, "eval", name, "--help")
    assert run.code == 0 and all(option in run.out for option in ("--data", "--arms", "--subtask", "--out"))


def test_a_run_in_which_nothing_ran_fails(capsys, tmp_path):
    data = write_mm_niah(tmp_path, episodes=1, questions=1, layouts=("LI",))
    for image in (data / "mm_niah_val" / "images").rglob("*.png"):
        image.write_bytes(b"no picture")
    run = kamera(capsys, *NIAH, "--data", data, "--out", tmp_path / "out", "--arms", "blind")
    assert run.code == 1 and "no item was answered" in run.err
    assert "UnreadableMedia" in run.err


def test_shards_are_run_and_merged_from_the_command_line(capsys, data, tmp_path):
    for i in (1, 2):
        run = kamera(
            *(capsys, *NIAH, "--data", data, "--out", tmp_path / str(i), "--shard", f"{i}/2"),
            *("--sample", "2", "--seed", "3", "--arms", "blind"),
        )
        assert run.code == 0 and "1 items" in run.out
    joined = kamera(
        capsys,
        "eval",
        "merge",
        tmp_path / "1",
        tmp_path / "2",
        "--out",
        tmp_path / "whole",
        "--format",
        "json",
    )
    assert joined.code == 0 and joined.document["items"] == 2
    refused = kamera(capsys, *NIAH, "--data", data, "--out", tmp_path / "3", "--shard", "3/2")
    assert refused.code == 2 and "3/2" in refused.err


def test_the_benchmark_of_reuse_is_frozen_run_and_run_again(capsys, tmp_path):
    freeze = ("eval", "freeze", "testbed", "--items", "2", "--seed", "3", "--out")
    made = kamera(capsys, *freeze, tmp_path / "a", "--format", "json").document
    again = kamera(capsys, *freeze, tmp_path / "b", "--format", "json").document
    assert made["digest"] == again["digest"] and (made["items"], made["questions"]) == (2, 18)
    assert kamera(capsys, *freeze, tmp_path / "a").code == 1
    run = ("eval", "reuse", "--data", tmp_path / "a", "--out", tmp_path / "run", "--limit", "1")
    arms = ("--arms", "reprefill,patch@16,other-patch@16", "--subtask", "slid")
    first = kamera(capsys, *run, *arms, "--format", "json")
    assert (first.document["items"], first.document["arms"][1]["summary"]["official"]) == (1, 1.0)
    lines = (tmp_path / "run" / "items.jsonl").read_bytes()
    shown = kamera(capsys, *run, *arms)
    assert "reuse: 1 items" in shown.out and (tmp_path / "run" / "items.jsonl").read_bytes() == lines


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (("reuse", "--data", "EMPTY", "--out", "x"), 1, "no benchmark here"),
        (
            ("reuse", "--data", "EMPTY", "--out", "x", "--system", "S", "--subtask", "no"),
            2,
            "reuse has no subtask 'no'",
        ),
        (("freeze", "tv", "--out", "x"), 2, "'tv' is none of testbed"),
        (("freeze", "ovo-bench", "--out", "x"), 2, "needs --data"),
    ],
)
def test_bad_usage_of_the_benchmark_of_reuse_is_one_line(capsys, tmp_path, arguments, code, said):
    run = kamera(capsys, "eval", *(str(tmp_path) if a == "EMPTY" else a for a in arguments))
    assert run.code == code and said in run.err and run.err.count("\n") == 1
