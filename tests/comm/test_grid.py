"""Which ranks divide states, which are replicas, and which divide matrices: found by one rank that runs alone."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from zeroshard.comm.grid import Grid, grid
from zeroshard.system import compat_groups


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_without_meshes_all_ranks_divide_one_set_of_states(rank: int) -> None:
    with compat_groups.one_rank_of(8, rank):
        assert grid(None, None, None) == Grid([[list(range(8))]], [[number] for number in range(8)])


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_the_rows_of_a_mesh_are_replicas(rank: int) -> None:
    with compat_groups.one_rank_of(8, rank):
        mesh = init_device_mesh("cpu", (2, 4))
        assert grid(mesh, None, None).data == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_every_tensor_parallel_rank_has_rows_of_its_own(rank: int) -> None:
    with compat_groups.one_rank_of(8, rank):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "shards", "model"))
        replicas = [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
        pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert grid(mesh["replicas", "shards"], mesh["model"], None) == Grid(replicas, pairs)
        columns = [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]
        assert grid(None, mesh["model"], None) == Grid(columns, pairs)


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_tensor_parallel_ranks_may_be_far_apart(rank: int) -> None:
    with compat_groups.one_rank_of(8, rank):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("model", "shards"))
        pairs = [[0, 4], [1, 5], [2, 6], [3, 7]]
        assert grid(mesh["shards"], mesh["model"], None) == Grid([[[0, 1, 2, 3]], [[4, 5, 6, 7]]], pairs)


def test_a_mesh_that_leaves_ranks_out_is_refused() -> None:
    with compat_groups.one_rank_of(8, 5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "shards", "model"))
        with pytest.raises(ValueError, match=r"\[\[\[4, 6\]\], .* are not the 8 ranks of the process group, each once"):
            grid(mesh["shards"], mesh["model"], None)
