"""Who stands where on the mesh, and what launchers and options say about it."""

from __future__ import annotations

import pickle

import pytest

from resin.plan import InvalidRequest
from resin.topology import MESH_AXES, Launch, MeshShape, Place, Topology, first_host


def test_a_mesh_says_its_axes_and_refuses_what_does_not_divide() -> None:
    mesh = MeshShape(dp=2, cp=1, tp=4)
    assert (mesh.size, str(mesh), str(MeshShape())) == (8, "dp 2 x tp 4", "one device")
    assert (mesh.split("num_experts", 16, MESH_AXES), mesh.split("num_attention_heads", 12)) == (2, 3)
    assert [mesh.split_kv(heads) for heads in (1, 2, 4, 8)] == [1, 1, 1, 2]
    assert pickle.loads(pickle.dumps(mesh)) == mesh and hash(mesh)
    with pytest.raises(InvalidRequest, match="tp=4: expected a divisor of num_attention_heads=6"):
        mesh.split("num_attention_heads", 6)
    with pytest.raises(InvalidRequest, match="dp x tp=8: expected a divisor of num_experts=12"):
        mesh.split("num_experts", 12, MESH_AXES)
    with pytest.raises(InvalidRequest, match="num_key_value_heads=3"):
        mesh.split_kv(3)
    with pytest.raises(InvalidRequest, match="cp=0"):
        MeshShape(cp=0)


def test_devices_processes_and_groups() -> None:
    topology = Topology(MeshShape(2, 2, 2), Launch(2, 1, "a:1"))
    assert [topology.place(device) for device in (0, 1, 6)] == [Place(0, 0, 0), Place(0, 0, 1), Place(1, 1, 0)]
    assert topology.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.groups("dp", "tp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert topology.groups(*MESH_AXES) == (tuple(range(8)),) and topology.groups()[3] == (3,)
    assert topology.group_of(5, "cp") == (5, 7)
    assert (topology.process_of(3), topology.process_of(4), list(topology.devices_of(1))) == (0, 1, [4, 5, 6, 7])
    assert (topology.replicas_of(0), topology.replicas_of(1)) == ((0,), (1,))
    assert (topology.spans_processes("tp"), topology.spans_processes("dp")) == (False, True)
    shown = str(topology).splitlines()
    assert shown[0] == "8 devices: dp 2 x cp 2 x tp 2; process 1 of 2 by options, coordinator a:1"
    assert shown[2].startswith("process 1: 4: dp1 cp0 tp0, 5: dp1 cp0 tp1")
    with pytest.raises(InvalidRequest, match="axis='ep'"):
        topology.groups("ep")


@pytest.mark.parametrize(
    ("mesh", "processes", "why"),
    [(MeshShape(tp=4), 3, "nodes=3: expected a divisor of the 4 devices"), (MeshShape(3, 1, 4), 2, "tp=4: expected")],
)
def test_processes_that_cannot_share_the_mesh_are_refused(mesh: MeshShape, processes: int, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Topology(mesh, Launch(processes, 0, "a:1"))


LAUNCHERS = {
    "torchrun": (
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "gpu0",
            "MASTER_PORT": "29500",
        },
        Launch(4, 3, "gpu0:29501", 1, 2, "torchrun"),
    ),
    "slurm": (
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1"},
        Launch(2, 1, "gpu07:6765", launcher="slurm"),
    ),
    "kubernetes": (
        {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.svc"},
        Launch(2, 1, "leader.svc:6765", launcher="kubernetes"),
    ),
    "nobody": ({}, Launch()),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_s_environment_is_understood(launcher: str) -> None:
    environment, expected = LAUNCHERS[launcher]
    assert Launch.detect(environment) == expected


def test_options_win_over_the_environment_and_complete_it() -> None:
    environment, _ = LAUNCHERS["torchrun"]
    launch = Launch.detect(environment, nodes=8, node_rank=7, coordinator="b:5")
    assert (launch.processes, launch.rank, launch.coordinator, launch.launcher) == (8, 7, "b:5", "torchrun")
    job = Launch.detect({"JOB_COMPLETION_INDEX": "1"}, nodes=2, coordinator="b:5")
    assert (job.rank, job.processes, job.launcher) == (1, 2, "kubernetes")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": 2, "node_rank": 2, "coordinator": "a:1"}, "node_rank=2: expected 0 to 1"),
        ({"nodes": 2}, "coordinator=None"),
        ({"nodes": 2, "coordinator": "a"}, "coordinator='a': expected HOST:PORT"),
        ({"nodes": 2, "coordinator": "a:99999"}, "expected HOST:PORT"),
        ({"environment": {"RANK": "x", "WORLD_SIZE": "2"}}, "RANK='x': expected a whole number"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Launch.detect(**({"environment": {}} | settings))  # type: ignore[arg-type]


def test_first_machines_of_slurm_lists() -> None:
    lists = {"gpu1": "gpu1", "gpu1,gpu2": "gpu1", "gpu[3-5]": "gpu3", "n[01,04]-ib": "n01-ib", "a,b[1-2]": "a", "": ""}
    assert {nodes: first_host(nodes) for nodes in lists} == lists
