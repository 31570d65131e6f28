"""Loops over models and optimizers of special structure: groups, frozen parts, tied and parametrised weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.loops.corpus.models import GPT, examples, sentences
from tests.loops.harness import EVERYWHERE, Corpus, Log, Parallel, Refusal
from tests.models import Net

corpus = Corpus()


@corpus.loop("another learning rate for each layer")
def layer_rates(parallel: Parallel) -> Log:
    net = Net(depth=3)
    layers = [net.first, *net.blocks, net.last]
    groups = [{"params": layer.parameters(), "lr": 0.1 * 0.8**depth} for depth, layer in enumerate(reversed(layers))]
    model, optimizer = parallel(net, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    return {"losses": _train(model, optimizer)}


@corpus.loop("a frozen backbone, frozen before `shard()`")
def freeze(parallel: Parallel) -> Log:
    net = Net(depth=3)
    for name, p in net.named_parameters():
        p.requires_grad = name.startswith(("last", "blocks.2"))
    trainable = filter(lambda p: p.requires_grad, net.parameters())
    model, optimizer = parallel(net, torch.optim.AdamW(trainable, lr=1e-2))
    return {"losses": _train(model, optimizer)}


@corpus.loop("the head is trained alone, then all is unfrozen, before `shard()`")
def unfreeze(parallel: Parallel) -> Log:
    net = Net(depth=2).requires_grad_(False)
    net.last.requires_grad_(True)
    optimizer = torch.optim.SGD(net.last.parameters(), lr=0.1)
    losses = []
    for step in range(2):  # the first phase trains the head alone, on one device
        x, y = torch.full((4, 7), 0.5 + step), torch.ones(4, 5)
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    net.requires_grad_(True)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9))
    return {"losses": losses + _train(model, optimizer)}


@corpus.loop("tied weights: the embedding is the head")
def tied_weights(parallel: Parallel) -> Log:
    net = GPT()
    assert net.wte.weight is net.lm_head.weight
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        _, loss = model(*sentences(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("`weight_norm` from `torch.nn.utils.parametrizations`, before `shard()`")
def weight_norm(parallel: Parallel) -> Log:
    net = Net(depth=2)
    for block in net.blocks:
        torch.nn.utils.parametrizations.weight_norm(block.up)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return {"losses": _train(model, optimizer)}


@corpus.loop("`spectral_norm` from `torch.nn.utils.parametrizations`, before `shard()`")
def spectral_norm(parallel: Parallel) -> Log:
    net = Net(depth=2)
    for block in net.blocks:
        torch.nn.utils.parametrizations.spectral_norm(block.down)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return {"losses": _train(model, optimizer)}


@corpus.loop(
    "two optimizers over parts of one model",
    Refusal(EVERYWHERE, "is in no group of the optimizer", "one optimizer with two parameter groups"),
)
def two_optimizers(parallel: Parallel, line: bool = False) -> Log:
    net = Net(depth=2)
    head, body = list(net.last.parameters()), [*net.first.parameters(), *net.blocks.parameters()]
    if line:
        groups = [{"params": head, "lr": 0.1}, {"params": body, "lr": 0.01}]
        model, optimizer = parallel(net, torch.optim.SGD(groups, momentum=0.9))
        optimizers = [optimizer]
    else:
        model, head_optimizer = parallel(net, torch.optim.SGD(head, lr=0.1, momentum=0.9))
        optimizers = [head_optimizer, torch.optim.SGD(body, lr=0.01, momentum=0.9)]
    losses = []
    for step in range(3):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("LBFGS, which does not update each element by itself", Refusal(EVERYWHERE, "LBFGS"))
def lbfgs(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4))
    x, y = examples(0)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    return {"losses": losses}


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
