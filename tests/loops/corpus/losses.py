"""Loops whose loss is more than a function of the model's output."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.loops.corpus.models import GPT, Heads, examples, sentences
from tests.loops.harness import Corpus, Log, Parallel
from tests.models import Net

corpus = Corpus()


@corpus.loop("an L2 term over `model.parameters()` in the loss")
def l2_term(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses, penalties = [], []
    for step in range(3):
        x, y = examples(step)
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        loss = F.mse_loss(model(x), y) + 1e-2 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        penalties.append(penalty.item())
    return {"losses": losses, "penalties": penalties}


@corpus.loop("an orthogonal regulariser on one module's weight")
def orthogonal_regulariser(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        w = net.blocks[0].down.weight
        loss = loss + 0.1 * (w @ w.t() - torch.eye(len(w))).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("a gradient penalty on the inputs (WGAN-GP): `torch.autograd.grad(..., create_graph=True)`")
def gradient_penalty(parallel: Parallel) -> Log:
    net = Net(depth=2, outputs=1)
    critic, optimizer = parallel(net, torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.5, 0.9)))
    losses = []
    for step in range(3):
        real, fake = examples(step)[0], examples(50 + step)[0]
        mixed = (0.3 * real + 0.7 * fake).requires_grad_(True)
        score = critic(mixed)
        (gradient,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("double backward through the weights: the norm of the gradient is in the loss")
def double_backward(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    losses = []
    for step in range(3):
        x, y = examples(step)
        loss = F.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + 0.01 * sum(g.pow(2).sum() for g in gradients)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("a Hessian-vector product, logged before each step")
def hessian_vector(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    losses, traces = [], []
    for step in range(3):
        x, y = examples(step)
        params = [p for p in net.parameters() if p.requires_grad]
        v = [torch.randint_like(p, 2) * 2 - 1 for p in params]  # Hutchinson's estimate of the trace
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), params, create_graph=True)
        products = torch.autograd.grad(gradients, params, grad_outputs=v)
        traces.append(sum((h * u).sum() for h, u in zip(products, v, strict=True)).item())
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "traces": traces}


@corpus.loop("a GAN: two models, two optimizers")
def gan(parallel: Parallel) -> Log:
    d_net, g_net = Net(depth=2, outputs=1), Net(depth=2, outputs=7)
    d, d_optimizer = parallel(d_net, torch.optim.Adam(d_net.parameters(), lr=2e-3, betas=(0.5, 0.999)))
    g, g_optimizer = parallel(g_net, torch.optim.Adam(g_net.parameters(), lr=2e-3, betas=(0.5, 0.999)))
    bce = torch.nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
    losses = []
    for step in range(3):
        real, z = examples(step)[0], torch.randn(6, 7)
        d.zero_grad()
        d_real = bce(d(real), ones)
        d_real.backward()
        fake = g(z)
        d_fake = bce(d(fake.detach()), zeros)
        d_fake.backward()
        d_optimizer.step()
        g.zero_grad()
        g_loss = bce(d(fake), ones)
        g_loss.backward()
        g_optimizer.step()
        losses += [(d_real + d_fake).item(), g_loss.item()]
    return {"losses": losses}


@corpus.loop("distillation from a frozen teacher, which is not sharded")
def distillation(parallel: Parallel) -> Log:
    teacher, student = Net(depth=3).eval(), Net(depth=2)
    for p in teacher.parameters():
        p.requires_grad = False
    model, optimizer = parallel(student, torch.optim.AdamW(student.parameters(), lr=1e-2))
    return {"losses": _distill(teacher, model, optimizer)}


@corpus.loop("distillation from a frozen teacher, which is sharded too")
def distillation_from_shards(parallel: Parallel) -> Log:
    teacher, student = Net(depth=3).eval().requires_grad_(False), Net(depth=2)
    teacher, _ = parallel(teacher)
    model, optimizer = parallel(student, torch.optim.AdamW(student.parameters(), lr=1e-2))
    return {"losses": _distill(teacher, model, optimizer)}


def _distill(
    teacher: torch.nn.Module, model: torch.nn.Module, optimizer: torch.optim.Optimizer, temperature: float = 2.0
) -> list[float]:
    losses = []
    for step in range(3):
        x, y = examples(step)
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / temperature, dim=-1)
        logits = model(x)
        soft = F.kl_div(F.log_softmax(logits / temperature, dim=-1), wanted, reduction="batchmean")
        loss = 0.5 * F.cross_entropy(logits, y.argmax(dim=1)) + 0.5 * soft * temperature**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@corpus.loop("losses of several heads, with learnt weights")
def several_heads(parallel: Parallel) -> Log:
    class Weighted(Heads):
        def __init__(self) -> None:
            super().__init__()
            self.log_variance = torch.nn.Parameter(torch.zeros(3))

    net = Weighted()
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        x, y = examples(step)
        out = model(x)
        parts = torch.stack(
            [
                F.cross_entropy(out["class"], y[:, :4].argmax(dim=1)),
                F.l1_loss(out["box"], y[:, :2]),
                F.binary_cross_entropy_with_logits(out["score"], (y[:, :1] > 0).float()),
            ]
        )
        loss = (torch.exp(-net.log_variance) * parts + net.log_variance).sum()  # Kendall et al., 2018
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("contrastive learning with the embeddings of all ranks")
def contrastive(parallel: Parallel) -> Log:
    net = Net(depth=2)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        x, _ = examples(step)
        z = F.normalize(model(torch.cat([x, x + 0.1 * torch.randn_like(x)])), dim=-1)
        everyone = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, z.detach())
        everyone[dist.get_rank()] = z  # gradients flow through one's own
        logits = z @ torch.cat(everyone).t() / 0.1
        here = len(z) * dist.get_rank()
        places = torch.arange(len(z))
        logits = logits.index_put((places, here + places), torch.tensor(-1e9))  # not with itself
        loss = F.cross_entropy(logits, here + (places + len(x)) % len(z))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@corpus.loop("reinforcement learning: `generate()` in evaluation, then a policy gradient")
def reinforce(parallel: Parallel) -> Log:
    net = GPT()
    reference = copy.deepcopy(net).eval().requires_grad_(False)
    model, optimizer = parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, texts = [], []
    for step in range(3):
        net.eval()
        text = net.generate(sentences(step)[0][:, :3], new_tokens=4)
        net.train()
        reward = (text[:, 3:] % 2 == 0).float().mean(dim=1)
        logits, _ = model(text[:, :-1])
        chosen = logits.log_softmax(-1).gather(-1, text[:, 1:, None])[:, 2:, 0]
        with torch.no_grad():
            before = reference(text[:, :-1])[0].log_softmax(-1).gather(-1, text[:, 1:, None])[:, 2:, 0]
        loss = -((reward - 0.2) * chosen.sum(dim=1)).mean() + 0.1 * (chosen - before).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        texts.append(text)
    return {"losses": losses, "texts": texts}
