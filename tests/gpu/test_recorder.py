"""Recording on a GPU: no step waits for the device, and the loss comes all the same."""

from __future__ import annotations

from pathlib import Path

import torch

import zeroshard
from tests.models import batch, net
from zeroshard.report.journal import read
from zeroshard.report.timeline import COMPUTE, typical


def test_ordinary_steps_do_not_wait_for_the_device(tmp_path: Path) -> None:
    model = net(depth=2)
    model, optimizer = zeroshard.shard(
        model, torch.optim.AdamW(model.parameters(), foreach=True), stage=2, device="cuda"
    )
    inputs, losses = batch(0).to("cuda"), []
    with zeroshard.record(model, tmp_path) as run:
        for step in range(40):
            if step == 33:  # memory is read at powers of two, and a trace has just ended
                torch.cuda.set_sync_debug_mode("error")
            try:
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            losses.append(loss.detach())
    found = read(tmp_path)
    assert [step.loss for step in found.steps] == [float(loss) for loss in losses]
    assert found.memory is not None
    assert found.memory.peak is not None
    window = typical(found.traced)
    assert window is not None
    assert window.busy(COMPUTE) > 0
