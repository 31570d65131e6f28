"""The formulas beside which a run is set, against the figures the papers print."""

import pytest
import torch

from zeroshard import Offload
from zeroshard.plan.papers.formulas import HostPart, paper_memory, paper_traffic, paper_volume, total_bytes


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_one_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    total = total_bytes(paper_memory(stage, world=64, precision="bf16").device, 7_500_000_000)
    assert total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_fp32_has_no_master_and_one_rank_divides_nothing() -> None:
    assert [str(row) for row in paper_memory(stage=3, world=1, precision="fp32").device] == ["4Ψ", "4Ψ", "8Ψ"]
    assert [str(row) for row in paper_memory(stage=3, world=4, precision="fp16").device] == ["2Ψ/4", "2Ψ/4", "12Ψ/4"]


def test_volume_is_two_psi_below_stage_three_and_three_less_what_is_kept_in_it() -> None:
    assert [paper_volume(stage, 2, kept=0.25)[0] for stage in range(4)] == [2, 2, 2, 2.75]
    assert paper_volume(3, world=1, kept=0.25)[0] == 0
    assert [paper_volume(stage, 2, kept=0.25, micro_batches=3)[0] for stage in range(4)] == [6, 4, 4, 8.25]


def test_offload_leaves_an_eighth_on_the_device_and_divides_the_rest_among_the_hosts_ranks() -> None:
    for world in (1, 4):
        device, host = paper_memory(stage=2, world=world, precision="fp16", part=HostPart(options=Offload()))
        assert total_bytes(device, 1000) == 2000
        assert total_bytes(host, 1000) == 14000 / world


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter"),
    [
        ({}, 14),
        ({"moments": torch.bfloat16}, 10),
        ({"moments": "8bit"}, 8 + 2 / 64),
        ({"split_master": True}, 14),
        ({"delayed_update_after": 40}, 16),
        ({"delayed_update_after": 40, "split_master": True}, 14),
        ({"parameters": "cpu"}, 16),
        ({"parameters": "cpu", "split_master": True}, 14),
    ],
    ids=str,
)
def test_bytes_a_parameter_on_the_host(options: dict[str, object], bytes_a_parameter: float) -> None:
    _, host = paper_memory(3, 1, "bf16", HostPart(options=Offload(**options)))
    assert total_bytes(host, 1) == bytes_a_parameter


def test_buffers_that_units_take_turns_with_stand_for_gradients_and_high_halves() -> None:
    options = Offload(update_in_backward=True, split_master=True, read_back=True, moments=torch.bfloat16)
    _, host = paper_memory(2, 2, "bf16", HostPart(options=options, largest_unit=0.1))
    assert [str(row) for row in host] == ["0", "14Ψ_unit/2", "6Ψ/2"]
    assert host[1].bytes(1000) == pytest.approx(700)


def test_four_bytes_a_parameter_cross_and_six_where_the_parameter_crosses_once_more() -> None:
    on_host, read_back = Offload(parameters="cpu"), Offload(split_master=True, read_back=True)
    assert paper_traffic("bf16", HostPart(options=Offload()), kept=0)[0] == 4
    assert paper_traffic("bf16", HostPart(options=read_back), kept=0)[0] == 6
    assert paper_traffic("bf16", HostPart(options=on_host), kept=0)[0] == 6
    assert paper_traffic("bf16", HostPart(options=on_host), kept=0.25)[0] == 5.5
    assert paper_traffic("fp32", HostPart(options=Offload()), kept=0)[0] == 8
    assert paper_traffic("bf16", HostPart(options=Offload(), share=0.5), kept=0)[0] == 2
