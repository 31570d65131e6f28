"""Loops that look at gradients, or change them, between backward and step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

import zeroshard
from tests.loops.corpus.models import GPT, examples, sentences
from tests.loops.harness import SHARDED_GRADIENTS, Corpus, Log, Parallel, Refusal, when
from tests.models import Net

corpus = Corpus()
WRITE_BY_GRADIENT = "`with zeroshard.gathered(model, write=True), zeroshard.gathered_gradients(model):`"
READ_BOTH = "`with zeroshard.gathered(model), zeroshard.gathered_gradients(model):`"


@contextmanager
def whole(model: Any, write: bool = False) -> Iterator[None]:
    """The line that loops need in which a gradient meets its parameter."""
    with zeroshard.gathered(model, write=write), zeroshard.gathered_gradients(model):
        yield


@corpus.loop("nanoGPT: gradient accumulation, `torch.nn.utils.clip_grad_norm_`, learning rate set by hand", clips=True)
def nanogpt(parallel: Parallel) -> Log:
    model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    model, optimizer = parallel(model, optimizer)
    losses, norms = [], []
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 4))
        for micro_step in range(2):
            _, loss = model(*sentences(2 * step + micro_step))
            loss = loss / 2
            loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * 2)
    return {"losses": losses, "norms": norms}


@corpus.loop("`torch.nn.utils.clip_grad_value_`", clips=True)
def clip_by_value(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(3):
        x, y = examples(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=0.01)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("a log of gradient norms: `p.grad.norm().item()`, `torch.isfinite(p.grad).all()`", clips=True)
def log_gradient_norms(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, norms, largest, finite = [], [], [], []
    for step in range(3):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in net.parameters():
            if p.grad is not None:
                norms.append(p.grad.detach().data.norm(2).item())
                largest.append(p.grad.abs().max().item())
                finite.append(bool(torch.isfinite(p.grad).all()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "largest": largest, "finite": finite}


@corpus.loop("a batch whose gradients are not finite is skipped", clips=True)
def skip_bad_batches(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, skipped = [], 0
    for step in range(4):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        if step == 1:
            loss = loss * float("inf")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            optimizer.zero_grad()
            skipped += 1
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "skipped": skipped}


@corpus.loop("gradient noise: `p.grad.add_(noise)`")
def gradient_noise(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    torch.manual_seed(3)  # the same noise on every rank
    for step in range(3):
        x, y = examples(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        sigma = 0.1 / (1 + step) ** 0.55
        for p in net.parameters():
            p.grad.add_(torch.randn_like(p.grad) * sigma)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("gradients scaled in place: `p.grad.mul_(...)`, `p.grad /= n`", clips=True)
def scale_gradients(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(3):
        for micro_step in range(3):
            x, y = examples(3 * step + micro_step)
            loss = F.mse_loss(model(x), y)
            loss.backward()
        for name, p in net.named_parameters():
            p.grad /= 3
            if name.startswith("first"):
                p.grad.data.mul_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("`torch.amp.GradScaler` under fp16 autocast, with clipping", clips=True)
def grad_scaler(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    losses, scales = [], []
    for step in range(5):
        x, y = examples(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return {"losses": losses, "scales": scales}


@corpus.loop(
    "SGD by hand: `p -= lr * p.grad`",
    Refusal(SHARDED_GRADIENTS, r"inside `with zeroshard\.gathered", WRITE_BY_GRADIENT),
)
def manual_sgd(parallel: Parallel, line: bool = False) -> Log:
    net = Net(depth=2)
    model, _ = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad(), when(line, whole, model, write=True):
            for p in net.parameters():
                p -= 0.1 * p.grad
        net.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop(
    "sharpness-aware minimisation (SAM): weights climb, a second backward, weights return",
    Refusal(SHARDED_GRADIENTS, "gathered_gradients", WRITE_BY_GRADIENT),
    clips=True,
)
def sam(parallel: Parallel, line: bool = False) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(3):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad(), when(line, whole, model, write=True):  # first step
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in net.parameters()]), p=2)
            climbed = {}
            for p in net.parameters():
                climbed[p] = p.grad * (0.05 / (norm + 1e-12))
                p.add_(climbed[p])  # climb to the local maximum "w + e(w)"
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad(), when(line, zeroshard.gathered, model, write=True):  # second step
            for p in net.parameters():
                p.sub_(climbed[p])  # get back to "w" from "w + e(w)"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop(
    "adaptive gradient clipping (AGC): norms of rows of weights and gradients",
    Refusal(SHARDED_GRADIENTS, "gathered_gradients", READ_BOTH),
)
def adaptive_clipping(parallel: Parallel, line: bool = False) -> Log:
    def unitwise_norm(x: Any) -> Any:
        return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)

    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(3):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with when(line, whole, model):
            for p in net.parameters():
                p_data, g_data = p.detach(), p.grad.detach()
                max_norm = unitwise_norm(p_data).clamp_(min=1e-3).mul_(0.01)
                grad_norm = unitwise_norm(g_data)
                clipped = g_data * (max_norm / grad_norm.clamp(min=1e-6))
                p.grad.detach().copy_(torch.where(grad_norm < max_norm, g_data, clipped))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}
