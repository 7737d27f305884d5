"""A job on Ray: what one process leaves, byte for byte, with a worker killed on the way."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from functools import partial

import pytest
import torch

from kamera import ChunkStore
from kamera.compile import CompileJob, Settings, read_plan, run_plan
from kamera.compile.cluster import Cluster, RayTeam
from kamera.engines.hf import Backbone, HfEngine, Observer
from kamera.errors import ClusterError, KameraError
from kamera.store import StoreAdmin
from tests.compile.same import contents
from tests.compile.saved import pictures, vision_model, write_plan
from tests.killing import Countdown, die

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs kamera[ray]")
SETTINGS = Settings(rank=4)


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("local", Cluster(None, max(2, torch.cuda.device_count()))),
        ("local:3", Cluster(None, 3)),
        ("ray", Cluster("auto", None)),
        ("ray://head.example:10001", Cluster("ray://head.example:10001", None)),
    ],
)
def test_a_cluster_is_named_by_where_it_is(text, cluster):
    assert Cluster.parse(text) == cluster


@pytest.mark.parametrize("text", ["", "local:0", "local:two", "ray://", "ray://head", "slurm", "local:2 "])
def test_another_name_is_refused(text):
    with pytest.raises(ValueError, match="is none of local, local:N, ray, ray://HOST:PORT"):
        Cluster.parse(text)


def plan_of(folder):
    frames = [[{"image": name}, f"{name}\n"] for name in pictures(folder, 6)]
    windows = [[frames[i], frames[j], frames[k]] for i, j, k in [(0, 1, 2), (0, 1, 3), (2, 3, 4), (3, 4, 5)]]
    windows += [[frames[5], frames[0]], [frames[4], frames[2], frames[0], frames[1]], [frames[2], frames[5]]]
    return read_plan(write_plan(folder, *windows))


@pytest.mark.slow
@needs_ray
def test_workers_store_the_objects_of_one_process_despite_kills(tmp_path):
    plan = plan_of(tmp_path)
    load = partial(one_is_deadly, vision_model(), tmp_path / "taken")
    with ChunkStore.open(tmp_path / "alone") as store:
        backbone = Backbone.from_pretrained(vision_model(), dtype="float32").engine
        alone = run_plan(plan, backbone, store, SETTINGS)
        want = contents(store)
    reach = partial(ChunkStore.open, tmp_path / "shared")
    with RayTeam(Cluster(None, 2), load, reach, SETTINGS, threads=1) as team, reach() as store:
        job = CompileJob(plan, team, store, SETTINGS)
        list(job.steps())
        report = job.report()
        assert contents(store) == want
        assert StoreAdmin(store).verify().quarantined == ()
    assert report.reruns == 1
    assert report.failures == ()
    assert report.patches.formed + report.patches.reused == alone.patches.formed + alone.patches.reused
    assert report.canonicals == alone.canonicals


@pytest.mark.slow
@needs_ray
def test_what_cannot_be_done_ends_the_job_by_name(tmp_path):
    plan = plan_of(tmp_path)
    reach = partial(ChunkStore.open, tmp_path / "shared")
    with pytest.raises(KameraError, match="no transformers model at"):
        RayTeam(
            Cluster(None, 1),
            partial(Backbone.from_pretrained, tmp_path / "nothing"),
            reach,
            SETTINGS,
        )
    assert not (tmp_path / "shared").exists()
    load = partial(Backbone.from_pretrained, vision_model(), dtype="float32")
    with RayTeam(Cluster(None, 1), load, reach, SETTINGS, threads=1) as team, reach() as store:
        job = CompileJob(plan, team, store, SETTINGS)
        with pytest.raises(ClusterError, match="one task has killed 3 workers"):
            list(team.run(die_of_it, ["a task"]))
        assert team.reruns == 2
        list(job.steps())  # the team is whole again
        assert job.report().failures == ()


@pytest.mark.slow
@needs_ray
def test_a_cluster_that_is_not_there_is_named(tmp_path):
    load = partial(Backbone.from_pretrained, vision_model(), dtype="float32")
    with pytest.raises(ClusterError, match=r"no Ray at ray://127\.0\.0\.1:1: "):
        RayTeam(
            Cluster("ray://127.0.0.1:1", None), load, partial(ChunkStore.open, tmp_path / "shared"), SETTINGS
        )
    assert not (tmp_path / "shared").exists()


def die_of_it(worker, task):
    die()


def one_is_deadly(model, marker) -> HfEngine:
    """The backbone of a worker; the first that asks for one dies at its second forward."""
    backbone = Backbone.from_pretrained(model, dtype="float32").engine
    with contextlib.suppress(FileExistsError):
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        # an observer: a forward of other code would be another model
        backbone.decoder.register_forward_pre_hook(Observer(Countdown(2).wrap(lambda *given: None)))
    return backbone
