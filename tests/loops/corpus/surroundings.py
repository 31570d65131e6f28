"""Loops with something around the step: schedulers, evaluation, hooks, compilers, profilers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.loops.corpus.models import examples
from tests.loops.harness import STAGE_3, Corpus, Log, Parallel, Refusal
from tests.models import Net

corpus = Corpus()


@corpus.loop("`OneCycleLR`, which also sets the momentum")
def one_cycle(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=5)
    losses, rates = [], []
    for step in range(4):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(scheduler.get_last_lr()[0])
    return {"losses": losses, "rates": rates}


@corpus.loop("warm-up by `LambdaLR`, made before `shard()`")
def warm_up(parallel: Parallel) -> Log:
    net = Net(depth=2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    model, optimizer = parallel(net, optimizer)
    losses, rates = [], []
    for step in range(4):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return {"losses": losses, "rates": rates}


@corpus.loop("`ReduceLROnPlateau`, by an evaluation on every rank")
def plateau(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    losses, scores, rates = [], [], []
    for epoch in range(4):
        model.train()
        x, y = examples(epoch)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            x, y = examples(99)
            score = F.mse_loss(model(x), y)
            dist.all_reduce(score)
        scheduler.step(score.item())
        losses.append(loss.item())
        scores.append(score.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return {"losses": losses, "scores": scores, "rates": rates}


@corpus.loop(
    "evaluation on rank 0 alone",
    Refusal(
        STAGE_3, "collective: every rank must make it.*a forward without gradients", "the same evaluation on every rank"
    ),
)
def evaluate_on_rank_0(parallel: Parallel, line: bool = False) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, scores = [], []
    for step in range(3):
        x, y = examples(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 or line:
            net.eval()
            with torch.no_grad():
                scores.append(F.mse_loss(net(x), y).item())
            net.train()
    return {"losses": losses, "scores": scores if dist.get_rank() == 0 else []}


@corpus.loop("gradient accumulation under DDP's `model.no_sync()`")
def accumulate_without_sync(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        with model.no_sync():
            for micro_step in range(2):
                x, y = examples(3 * step + micro_step)
                (F.mse_loss(model(x), y) / 3).backward()
        x, y = examples(3 * step + 2)
        loss = F.mse_loss(model(x), y) / 3
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("`torch.func.functional_call` with the model's parameters")
def functional(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(3):
        x, y = examples(step)
        optimizer.zero_grad()
        loss = F.mse_loss(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("`torch.func.functional_call` with changed parameters")
def functional_with_changes(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(3):
        x, y = examples(step)
        optimizer.zero_grad()
        noisy = {name: p + 0.01 * torch.randn(p.shape) for name, p in model.named_parameters()}
        loss = F.mse_loss(torch.func.functional_call(model, noisy, (x,)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("activation checkpoints by `torch.utils.checkpoint`")
def recompute(parallel: Parallel) -> Log:
    class Recomputed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.last(x)

    net = Recomputed(depth=3)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return {"losses": _train(model, optimizer)}


@corpus.loop("forward hooks that log activations and weights")
def forward_hooks(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    seen = []

    def log(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen.append(output.detach().abs().mean().item())
        seen.extend(p.detach().norm().item() for p in module.parameters(recurse=False))

    for module in net.modules():
        module.register_forward_hook(log)
    for block in net.blocks:
        block.register_forward_hook(lambda block, *_: seen.append(block.up.weight.std().item()))
    return {"losses": _train(model, optimizer), "seen": seen}


@corpus.loop("`torch.profiler`, with a schedule")
def profiler(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, profiles = [], []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1),
        on_trace_ready=lambda profile: profiles.append(len(profile.key_averages()) > 0),
        record_shapes=True,
    ) as profile:
        for step in range(3):
            x, y = examples(step)
            optimizer.zero_grad()
            with torch.profiler.record_function("forward"):
                loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            profile.step()
            losses.append(loss.item())
    return {"losses": losses, "profiles": profiles}


@corpus.loop("`torch.autograd.set_detect_anomaly(True)`")
def anomaly_mode(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    with torch.autograd.detect_anomaly(check_nan=True):
        return {"losses": _train(model, optimizer)}


@corpus.loop("`torch.compile(model)`", slow=True)
def compile_model(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    model = torch.compile(model, backend="aot_eager")
    return {"losses": _train(model, optimizer)}


@corpus.loop("`block.compile(fullgraph=True)` for every block", slow=True)
def compile_blocks_in_place(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    for block in net.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return {"losses": _train(model, optimizer)}


@corpus.loop("`torch.compile(block)` for every block", slow=True)
def compile_blocks(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, backend="aot_eager")
    return {"losses": _train(model, optimizer)}


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        x, y = examples(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
