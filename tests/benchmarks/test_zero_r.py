"""The search for the largest model, on a machine whose memory is a formula."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks import zero_r


@pytest.mark.parametrize("cap", [16, 32, 64])
def test_the_largest_model_that_fits_is_found_within_the_margin(cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = argparse.Namespace(cap=cap, hidden=8192, fixed=50)

    def peak_of(layers: int, arguments: argparse.Namespace, options: dict[str, Any]) -> tuple[float, float] | None:
        size = 2e9 + 0.12e9 * layers
        return (0.9 * size, size) if size <= arguments.cap * zero_r.GB else None

    monkeypatch.setattr(zero_r, "peak_of", peak_of)
    result = zero_r.measure("C4", arguments)
    largest = (cap * 1e9 - 2e9) / 0.12e9  # layers
    assert result.largest_billions == pytest.approx(12 * 8192**2 * largest / 1e9, rel=zero_r.MARGIN)
    assert result.too_large_billions is not None
    assert result.too_large_billions > result.largest_billions


def test_the_configurations_are_those_of_the_presets() -> None:
    from zeroshard.config.job import load_job
    from zeroshard.config.options import Config

    for name, options in zero_r.CONFIGURATIONS.items():
        config = Config.parse(load_job(f"zero-40b-{name.lower()}").shard)
        assert (config.stage, config.defragment, config.activations) == tuple(options.values())
