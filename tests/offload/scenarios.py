"""Ways to train a small model, each a few lines, that must give the same bits however the host's work is overlapped."""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.models import Block, batch, loss_of, net
from zeroshard import LossScale, Offload, Precision
from zeroshard.offload.kernel import Pool
from zeroshard.offload.pipeline import Pipeline

STEPS = 4
Train = Callable[[Any, Any], None]


# -- optimizers ----------------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_trained(model), lr=1e-2, weight_decay=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(_trained(model), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), maximize=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(model), lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(model), lr=0.05)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    members = _trained(model)
    groups = [
        {"params": members[::2], "lr": 0.03, "weight_decay": 0.0},
        {"params": members[1::2], "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# -- models --------------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    return net(depth=3, width=9)


def half_frozen() -> nn.Module:
    model = small()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    model.first.bias.requires_grad_(False)
    return model


class Tied(nn.Module):
    """An embedding and a head with one weight, and a block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9, bias=False)
        self.blocks = nn.ModuleList(Block(9) for _ in range(3))
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x @ self.head.weight


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(9), Block(9)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return self.left(x) if left else self.right(x)


class Forked(nn.Module):
    """Blocks of two branches; which one runs depends on step, block and, if asked, rank."""

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.by_rank = by_rank
        self.first = nn.Linear(7, 9)
        self.never = nn.Linear(3, 3)
        self.forks = nn.ModuleList(Fork() for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x)
        rank = torch.distributed.get_rank() if self.by_rank and torch.distributed.is_initialized() else 0
        for number, fork in enumerate(self.forks):
            x = fork(x, (step + number + rank) % 2 == 0)
        return x


class Wandering(nn.Module):
    """Runs its blocks in another order every step, and sometimes leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(Block(9) for _ in range(3))
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x)
        for number in ((0, 1, 2), (2, 0, 1), (1, 0), (0, 1, 2, 0))[step % 4]:
            x = self.blocks[number](x)
        return self.last(x)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def checkpointed(reentrant: bool) -> nn.Module:
    model = small()

    def forward(x: Tensor) -> Tensor:
        x = model.first(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return model.last(x)

    model.forward = forward  # type: ignore[method-assign]
    return model


# -- loops ---------------------------------------------------------------------------------------------------------


def plain(model: Any, optimizer: Any) -> None:
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def stepwise(model: Any, optimizer: Any) -> None:
    """For models that are told the step."""
    for step in range(STEPS + 1):
        model(batch(step), step).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def micro_batches(model: Any, optimizer: Any) -> None:
    for step in range(STEPS):
        for micro in range(1 + step % 3):
            loss_of(model, 10 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def delayed_reduce(model: Any, optimizer: Any) -> None:
    for step in range(STEPS):
        with zeroshard.no_sync(model):
            for micro in range(step % 3):
                loss_of(model, 10 * step + micro).backward()
        loss_of(model, 10 * step + 9).backward()
        if step % 2:
            loss_of(model, 10 * step + 8).backward()
        optimizer.step()
        optimizer.zero_grad()


def scheduled(model: Any, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.3)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
        for group in optimizer.param_groups:
            group["weight_decay"] *= 2
        optimizer.zero_grad()


def averaged(model: Any, optimizer: Any) -> None:
    """Keeps a moving average of the parameters, and starts anew from it in the end."""
    mean = zeroshard.full_state_dict(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            for name, value in zeroshard.full_state_dict(model).items():
                mean[name].lerp_(value, 0.5)
        else:
            with zeroshard.gathered(model):
                for name, value in model.state_dict().items():
                    mean[name].lerp_(value, 0.5)
    with zeroshard.gathered(model, write=True):
        model.load_state_dict(mean)
    loss_of(model, 99).backward()
    optimizer.step()


def evaluating(model: Any, optimizer: Any) -> None:
    for step in range(STEPS):
        loss_of(model, step).backward()
        if step == 2:
            with torch.no_grad():
                loss_of(model, 77)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            model.eval()
            with torch.no_grad():
                loss_of(model, 88)
            model.train()


def clipping_by_hand(model: Any, optimizer: Any) -> None:
    for step in range(STEPS + 1):
        loss_of(model, step).backward()
        assert float(optimizer.clip_grad_norm_(0.01)) > 0.01
        if step % 2:
            loss_of(model, 50 + step).backward()
        if step == 3:
            optimizer.clip_grad_norm_(0.02)
            optimizer.clip_grad_norm_(0.005)
        optimizer.step()
        optimizer.zero_grad()


def dropping(model: Any, optimizer: Any) -> None:
    """Gradients are thrown away: all, those of some parameters, of a whole unit, before and after another backward."""
    for step in range(2 * STEPS):
        loss_of(model, step).backward()
        if step % 4 == 1:
            (optimizer if step == 1 else model).zero_grad()
        elif step % 4 == 2:
            for parameter in list(model.parameters())[::3]:
                parameter.grad = None
        elif step % 4 == 3:
            model.blocks[1].zero_grad(set_to_none=False)
        if step not in (1, 5):
            loss_of(model, 100 + step).backward()
        if step != 5:
            optimizer.step()
        optimizer.zero_grad()


def failing(model: Any, optimizer: Any) -> None:
    """A backward that raises half way, and training that goes on."""

    def raise_now(gradient: Tensor) -> None:
        raise ValueError("on purpose")

    for step in range(STEPS):
        if step in (1, 2):
            seen: list[Tensor] = []
            watched = model.blocks[1].register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
            loss = loss_of(model, 100 + step)
            watched.remove()
            seen[0].register_hook(raise_now)
            with pytest.raises(ValueError, match="on purpose"):
                loss.backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.zero_grad()
                loss_of(model, step).backward()
        else:
            loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def closing(model: Any, optimizer: Any) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss.item()

        assert optimizer.step(closure) > 0


def looking(model: Any, optimizer: Any) -> None:
    """Everything that waits for the host, directly after step()."""
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        looks: list[Callable[[], object]] = [
            lambda: zeroshard.synchronize(model),
            lambda: optimizer.state_dict(),
            lambda: [torch.isfinite(v).all() for s in optimizer.state.values() for v in s.values()],
            lambda: zeroshard.stats(model),
        ]
        looks[step % 4]()
        optimizer.zero_grad()


# -- scenarios -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A model, an optimizer, options and a loop."""

    train: Train = plain
    build: Callable[[], nn.Module] = small
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (3,)
    """In which it runs asynchronously on two ranks, besides stage 1 that waits."""

    def begin(self, stage: int, offload: Offload | None = None, **options: Any) -> tuple[Any, Any]:
        """The model and its optimizer, untrained."""
        model = self.build()
        given = {**self.options, **options}
        return zeroshard.shard(model, self.make(model), stage=stage, offload=offload, **given)

    def run(self, stage: int, offload: Offload | None = None, **options: Any) -> Result:
        """Trains, and returns all that training has changed."""
        model, optimizer = self.begin(stage, offload, **options)
        self.train(model, optimizer)
        states = {
            f"{number}.{name}": value
            for number, state in copy.deepcopy(optimizer.state_dict())["state"].items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        stats = zeroshard.stats(model)
        return Result(zeroshard.full_state_dict(model), states, stats.skipped_steps, stats.grad_norm)


@dataclass(frozen=True)
class Result:
    """What training has left behind."""

    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    skipped_steps: int
    grad_norm: float | None


FP16 = Precision(parameters=torch.float16, loss_scale=LossScale(initial=2.0**22, factor=2.0**5, growth_interval=2))
CLIPPED = {"clip_grad_norm": 0.02}
BF16 = {"precision": "bf16"}

SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(stages=(0, 2)),
    "plain in bf16": Scenario(options=BF16, stages=(2, 3)),
    "clipping": Scenario(options=CLIPPED),
    "clipping in bf16": Scenario(options=BF16 | CLIPPED),
    "micro-batches": Scenario(micro_batches),
    "micro-batches and clipping in bf16": Scenario(micro_batches, options=BF16 | CLIPPED, stages=(0, 1, 2, 3)),
    "micro-batches reduced in fp32": Scenario(
        micro_batches, options={"precision": Precision(parameters=torch.bfloat16, reduce=torch.float32), **CLIPPED}
    ),
    "groups": Scenario(make=grouped),
    "groups in bf16 with a schedule": Scenario(scheduled, make=grouped, options=BF16),
    "adam": Scenario(make=adam),
    "momentum": Scenario(make=momentum, train=micro_batches),
    "sgd without moments": Scenario(make=sgd, options=BF16),
    "fp16 with skipped steps": Scenario(
        lambda model, optimizer: [plain(model, optimizer) for _ in range(2)] and None, options={"precision": FP16}
    ),
    "fp16 with skipped steps, micro-batches and clipping": Scenario(
        lambda model, optimizer: [micro_batches(model, optimizer) for _ in range(2)] and None,
        options={"precision": FP16, **CLIPPED},
    ),
    "a schedule": Scenario(scheduled),
    "a moving average": Scenario(averaged),
    "a moving average in bf16": Scenario(averaged, options=BF16),
    "unused parameters": Scenario(stepwise, build=partial(seeded, partial(Forked, False))),
    "parameters that some ranks use": Scenario(
        stepwise, build=partial(seeded, partial(Forked, True)), options=BF16 | CLIPPED
    ),
    "frozen parameters": Scenario(build=half_frozen, options=BF16, stages=(1,)),
    "tied weights and a block called twice": Scenario(build=partial(seeded, Tied)),
    "a changing order": Scenario(stepwise, build=partial(seeded, Wandering), options=CLIPPED),
    "delayed reduction": Scenario(delayed_reduce, options=BF16, stages=(0, 3)),
    "evaluation": Scenario(evaluating, options=BF16 | CLIPPED),
    "clipping by hand": Scenario(clipping_by_hand),
    "clipping by hand in bf16": Scenario(clipping_by_hand, options=BF16),
    "dropped gradients": Scenario(dropping, stages=(0, 3)),
    "dropped gradients in bf16 with clipping": Scenario(dropping, options=BF16 | CLIPPED),
    "a failed backward": Scenario(failing, options=CLIPPED, stages=(2, 3)),
    "closures": Scenario(closing),
    "looks at everything": Scenario(looking, options=BF16),
    "reentrant recomputation": Scenario(build=partial(checkpointed, True)),
    "recomputation": Scenario(build=partial(checkpointed, False), options=BF16),
}


# -- comparison ----------------------------------------------------------------------------------------------------


def assert_same_result(ours: Result, theirs: Result, where: str) -> None:
    """Bit for bit."""
    for kind in ("weights", "states"):
        mine, other = getattr(ours, kind), getattr(theirs, kind)
        assert mine.keys() == other.keys(), f"{where}: {kind} {mine.keys() ^ other.keys()}"
        different = [name for name in mine if not torch.equal(mine[name], other[name])]
        assert not different, f"{where}: {kind} differ: {different}"
        assert all(bool(torch.isfinite(value).all()) for value in mine.values()), f"{where}: {kind} are not finite"
    assert ours.skipped_steps == theirs.skipped_steps, where
    assert ours.grad_norm == theirs.grad_norm, where


def assert_close_result(ours: Result, theirs: Result, where: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Parameters within rounding; on average, if they have 16 bits, because a flipped bit goes its own way."""
    assert ours.weights.keys() == theirs.weights.keys(), where
    for name, value in theirs.weights.items():
        if value.dtype is torch.float32:
            message = f"{where}: {name}: "
            torch.testing.assert_close(
                ours.weights[name], value, rtol=rtol, atol=atol, msg=lambda text, message=message: message + text
            )
        else:
            difference = float((ours.weights[name].float() - value.float()).abs().mean())
            assert difference < 5e-3, f"{where}: {name}: {difference}"
    assert ours.skipped_steps == theirs.skipped_steps, where
    if theirs.grad_norm is not None:
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.05), where


@contextmanager
def slow_host(seconds: float = 0.001, seed: int = 0) -> Iterator[None]:
    """Makes the host's threads late, each time by another while, so that nothing is ready by chance."""
    late = random.Random(seed)
    update, copy = Pool.update, Pipeline.copy

    def slow_update(*args: Any) -> None:
        time.sleep(seconds * late.random())
        update(*args)

    def slow_copy(*args: Any) -> Any:
        time.sleep(seconds * late.random())
        return copy(*args)

    Pool.update = slow_update  # type: ignore[method-assign]
    Pipeline.copy = slow_copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pool.update = update  # type: ignore[method-assign]
        Pipeline.copy = copy  # type: ignore[method-assign]


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other by spinning, which takes the cores from the host's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
