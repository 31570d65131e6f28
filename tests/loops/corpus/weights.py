"""Loops that read, copy, average or change weights between steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import zeroshard
from tests.loops.corpus.models import examples
from tests.loops.harness import EVERYWHERE, OFFLOAD, STAGE_3, Corpus, Log, Parallel, Refusal, when
from tests.models import Net

corpus = Corpus()
WRITE = "`with zeroshard.gathered(model, write=True):`"
COPY = "`copied.load_state_dict(zeroshard.full_state_dict(model))`, where `copied` is a new model"


@corpus.loop("a log of weights: `p.norm()`, histograms, the size of the last update")
def log_weights(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, norms, histograms, updates = [], [], [], []
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for step in range(3):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            for name, p in net.named_parameters():
                norms.append(p.norm().item())
                histograms.append(torch.histc(p.float().cpu(), bins=10, min=-1, max=1))
                updates.append((p - before[name]).abs().mean().item())
                before[name] = p.clone()
    return {"losses": losses, "norms": norms, "histograms": histograms, "updates": updates}


@corpus.loop("a moving average of the weights by hand: `e.data.mul_(d).add_(p.data, alpha=1 - d)`")
def ema_by_hand(parallel: Parallel) -> Log:
    net = Net(depth=2)
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, scores = [], []
    for step in range(3):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p, e in zip(net.parameters(), ema.parameters(), strict=True):
            e.data.mul_(0.9).add_(p.data, alpha=0.1)
        losses.append(loss.item())
        scores.append(F.mse_loss(ema(x), y).item())
    return {"losses": losses, "scores": scores, "average": ema.state_dict()}


@corpus.loop("`AveragedModel`, made before `shard()`, updated after each `step()`")
def averaged_model(parallel: Parallel) -> Log:
    net = Net(depth=2)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        x, y = examples(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(net)
        losses.append(loss.item())
    return {"losses": losses, "average": average.module.state_dict()}


@corpus.loop("stochastic weight averaging: `AveragedModel`, `SWALR`, `update_bn`")
def swa(parallel: Parallel) -> Log:
    net = torch.nn.Sequential(torch.nn.Linear(7, 16), *(SwaBlock() for _ in range(2)), torch.nn.Linear(16, 5))
    average = AveragedModel(net)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=1)
    losses = []
    for epoch in range(4):
        x, y = examples(epoch)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if epoch >= 2:
            average.update_parameters(net)
            swa_scheduler.step()
        else:
            scheduler.step()
        losses.append(loss.item())
    update_bn([examples(step)[0] for step in range(2)], average)
    return {"losses": losses, "average": average.state_dict()}


class SwaBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x: Any) -> Any:
        return x + torch.relu(self.norm(self.linear(x)))


@corpus.loop("checkpoint averaging: `state_dict()` every few steps")
def average_checkpoints(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, checkpoints = [], []
    for step in range(6):
        x, y = examples(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 2 == 1:
            checkpoints.append({name: value.clone() for name, value in net.state_dict().items()})
    average = {name: sum(each[name] for each in checkpoints) / len(checkpoints) for name in checkpoints[0]}
    final = Net(depth=2)
    final.load_state_dict(average)
    return {"losses": losses, "average": average, "score": final(x).square().mean().item()}


@corpus.loop("early stopping: `state_dict()` in memory, restored by `load_state_dict()`")
def early_stopping(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9))
    losses, best, best_state = [], float("inf"), {}
    held_out = torch.randn(8, 7), torch.randn(8, 5)
    for step in range(4):
        x, y = examples(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            score = F.mse_loss(model(held_out[0]), held_out[1]).item()
        if score < best:
            best, best_state = score, copy.deepcopy(net.state_dict())
    net.load_state_dict(best_state)
    with torch.no_grad():
        score = F.mse_loss(model(held_out[0]), held_out[1]).item()
    return {"losses": losses, "best": best, "score": score}


@corpus.loop(
    "a target network: `copy.deepcopy(model)` before `shard()`, then a soft update that reads `p.data`",
)
def target_network(parallel: Parallel) -> Log:
    net = Net(depth=2)
    target = copy.deepcopy(net)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        state, next_state = examples(step)[0], examples(50 + step)[0]
        with torch.no_grad():
            wanted = 1.0 + 0.9 * target(next_state).max(dim=1).values
        loss = F.smooth_l1_loss(model(state).max(dim=1).values, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for target_param, param in zip(target.parameters(), net.parameters(), strict=True):
            target_param.data.copy_(0.1 * param.data + 0.9 * target_param.data)
        losses.append(loss.item())
    return {"losses": losses, "target": target.state_dict()}


@corpus.loop("`copy.deepcopy(model)` after `shard()`", Refusal(EVERYWHERE, "cannot be copied.*full_state_dict", COPY))
def copy_after_shard(parallel: Parallel, line: bool = False) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(4):
        if step % 2 == 0:
            if line:
                target = Net(depth=2).eval()
                target.load_state_dict(zeroshard.full_state_dict(net))
            else:
                target = copy.deepcopy(net).eval()
        x, _ = examples(step)
        with torch.no_grad():
            wanted = target(x)
        loss = F.mse_loss(model(x), 0.9 * wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "target": target.state_dict()}


@corpus.loop(
    "WGAN: `p.data.clamp_(-c, c)` after each step of the critic",
    Refusal(STAGE_3 | OFFLOAD, r"written to through \.data.*gathered\(model, write=True\)", WRITE),
)
def wgan(parallel: Parallel, line: bool = False) -> Log:
    critic_net, generator_net = Net(depth=2, outputs=1), Net(depth=2, outputs=7)
    critic, critic_optimizer = parallel(critic_net, torch.optim.SGD(critic_net.parameters(), lr=5e-2))
    generator, optimizer = parallel(generator_net, torch.optim.SGD(generator_net.parameters(), lr=5e-2))
    losses = []
    for step in range(3):
        for critic_step in range(2):
            real, noise = examples(2 * step + critic_step)[0], torch.randn(6, 7)
            critic_loss = critic(generator(noise).detach()).mean() - critic(real).mean()
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            with when(line, zeroshard.gathered, critic, write=True):
                for p in critic_net.parameters():
                    p.data.clamp_(-0.05, 0.05)
        loss = -critic(generator(torch.randn(6, 7))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [critic_loss.item(), loss.item()]
    return {"losses": losses}


@corpus.loop(
    "weight decay by hand: `with torch.no_grad(): p.mul_(1 - lr * wd)`",
    Refusal(STAGE_3 | OFFLOAD, r"gathered\(model, write=True\)", WRITE),
)
def decay_by_hand(parallel: Parallel, line: bool = False) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(3):
        x, y = examples(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad(), when(line, zeroshard.gathered, model, write=True):
            for p in net.parameters():
                if p.ndim > 1:
                    p.mul_(1 - 0.1 * 0.1)
        losses.append(loss.item())
    return {"losses": losses}
