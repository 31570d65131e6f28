import argparse

import pytest

from benchmarks.launch_count import measure


def test_a_unit_costs_the_host_no_more_calls_than_when_they_were_last_cut() -> None:
    arguments = argparse.Namespace(layers=(2, 4), world=8, device="cpu", keep_activations=False, compile="")
    counts, files, operations = measure("stage 3", arguments)
    assert files
    assert operations
    assert 0 < counts["Python calls, zeroshard"] <= 480, files
    assert 0 < counts["C calls, zeroshard"] <= 520, files
    assert 0 < counts["operations, zeroshard"] <= 43, operations
    assert 0 < counts["kernels, zeroshard"] <= 10, operations


@pytest.mark.slow
def test_a_compiled_unit_costs_no_more_calls() -> None:
    arguments = argparse.Namespace(layers=(2, 4), world=8, device="cpu", keep_activations=False, compile="eager")
    counts, files, _ = measure("stage 3", arguments)
    assert 0 < counts["Python calls, zeroshard"] <= 480, files
    assert 0 < counts["C calls, zeroshard"] <= 520, files
