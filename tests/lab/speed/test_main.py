"""``python -m lab.speed``."""

from __future__ import annotations

import json

import pytest
import torch

from lab.speed.__main__ import Benchmark, main
from lab.speed.settings import NAMES
from tests.cli.run import run

QUICK = ("--preset", "tiny", "--lengths", "32", "--rounds", "1", "--seconds", "0")


def test_every_benchmark_has_a_name():
    assert tuple(name.value for name in Benchmark) == NAMES


def test_bench_prints_one_json_document(capsys):
    threads = torch.get_num_threads()
    done = run(capsys, main, "apply", *QUICK, "--threads", "2", "--format", "json", "-q")
    assert done.code == 0 and done.err == ""
    document = done.document
    assert document["benchmark"] == "apply" and document["machine"]["threads"] == 2
    assert document["command"].startswith("python -m lab.speed apply --preset tiny --lengths 32 --threads 2")
    assert torch.get_num_threads() == threads


def test_the_command_in_the_result_is_one_that_works(capsys):
    document = run(capsys, main, "apply", *QUICK, "--format", "json", "-q").document
    again = run(capsys, main, *document["command"].split()[3:], "--format", "json", "-q").document
    assert again["settings"] == document["settings"] and again["command"] == document["command"]


def test_bench_prints_tables_for_people(capsys, tmp_path):
    file = tmp_path / "apply.txt"
    done = run(capsys, main, "apply", *QUICK, "--output", file)
    assert done.code == 0 and done.out == ""
    text = file.read_text(encoding="utf-8")
    assert "re-prefill" in text and "share of copy" in text and "python -m lab.speed apply" in text


def test_json_goes_to_a_file(capsys, tmp_path):
    file = tmp_path / "serve.json"
    done = run(capsys, main, "serve", *QUICK, "--format", "json", "--output", file)
    assert done.code == 0
    assert json.loads(file.read_text(encoding="utf-8"))["benchmark"] == "serve"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "nonsense"),
        (["apply", "--preset", "gpt-2"], "gpt-2"),
        (["apply", "--preset", "tiny", "--lengths", "256,many"], "many"),
        (["apply", "--preset", "tiny", "--lengths", "0"], "lengths (0,)"),
        (["apply", "--preset", "tiny", "--device", "cuda:97"], "cuda:97"),
    ],
)
def test_bad_usage_is_two_and_names_the_value(capsys, arguments, said):
    done = run(capsys, main, *arguments)
    assert done.code == 2 and done.out == "" and said in done.err
