"""Ray Train: what a local run cannot show. The example, which a test runs, shows the rest."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
from torch import nn

import zeroshard
from tests.ranks import on_ranks


@pytest.mark.slow
@on_ranks(1)
def test_storage_that_is_no_folder_is_refused() -> None:
    from pyarrow.fs import FileSystem

    from zeroshard.integrations.ray import report

    storage = SimpleNamespace(storage_filesystem=mock.Mock(spec=FileSystem), storage_fs_path="bucket/runs")
    context = SimpleNamespace(get_storage=lambda: storage)
    model, _ = zeroshard.shard(nn.Linear(2, 2).requires_grad_(False))
    with (
        mock.patch("ray.train.get_context", return_value=context),
        pytest.raises(ValueError, match=r"bucket/runs.*give RunConfig"),
    ):
        report({}, model)
