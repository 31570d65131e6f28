"""What ``shard()`` refuses, it refuses at once, naming the cause and the remedy; and it leaves the model as it was."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Net, batch, net
from tests.ranks import on_ranks
from tests.training import STAGES, sgd, train
from zeroshard.comm.process_group import warn_of_gloo


def refuse(
    model: Any,
    optimizer: Any,
    match: str,
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
    **options: Any,
) -> None:
    with pytest.raises(error, match=match):
        zeroshard.shard(model, optimizer, **options)


def assert_untouched(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """After a refusal the model trains plainly, and can be sharded when the mistake is mended."""
    assert all(not parameter.isnan().any() for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), net().state_dict().values(), strict=True))
    before = model.get_parameter("first.weight").detach().clone()
    train(model, optimizer, 0)
    assert not torch.equal(before, model.get_parameter("first.weight"))
    model, sharded = zeroshard.shard(model, optimizer, stage=2)
    train(model, sharded, 1)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match", "error"),
    [
        ({"stages": 2}, r"'stages'.*did you mean 'stage'", TypeError),
        ({"offlaod": "cpu"}, r"'offlaod'", TypeError),
        ({"stage": 4}, r'stage=4 must be 0, 1, 2, 3 or "auto"', ValueError),
        ({"stage": -1}, r"stage=-1", ValueError),
        ({"stage": "2"}, r"stage='2'", ValueError),
        ({"stage": 1, "prefetch": 1}, r"prefetch=1 has no effect in stage 1.*stage=3", ValueError),
        ({"stage": 2, "keep": ()}, r"keep=\(\) has no effect in stage 2", ValueError),
        ({"stage": 1, "reads": "raise"}, r"reads='raise' has no effect in stage 1.*stage=3", ValueError),
        ({"reads": "never"}, r"reads='never'.*gather.*raise", ValueError),
        ({"clip_grad_norm": 0.0}, r"clip_grad_norm=0.0", ValueError),
        ({"clip_grad_norm": math.nan}, r"clip_grad_norm=nan", ValueError),
        ({"precision": "fp8"}, r"precision='fp8'", ValueError),
        ({"units": "block.*"}, r"units='block.\*' matches no module", ValueError),
        ({"units": [nn.Conv2d]}, r"Conv2d.*matches no module", ValueError),
        ({"units": ["blocks.0", "blocks.0.up"]}, r"blocks\.0\.up.*cannot be nested", ValueError),
        ({"keep": ("blocks.9",)}, r"keep.*blocks\.9", ValueError),
        ({"device": "meta"}, r"device", ValueError),
        ({"arena": True}, r"arena is gone, because .*; use defragment=True", TypeError),
        ({"defragment": 1}, r"defragment=1", ValueError),
        ({"defragment": True, "device": "cpu"}, r"defragment=True has no effect on a CPU.*; leave it out", ValueError),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_and_named(
    options: dict[str, Any], match: str, error: type[Exception]
) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    refuse(model, optimizer, match, error, **options)
    assert_untouched(model, optimizer)


def test_every_mistake_is_told_at_once() -> None:
    model, optimizer = built()
    with pytest.raises(ValueError, match="7 mistakes in the options") as caught:
        zeroshard.shard(
            model,
            optimizer,
            stage=2,
            prefetch=1,
            clip_grad_norm=-1.0,
            precision={"parameters": "bf61", "cast_inputs": "no"},
            offload={"threads": 0, "parameters": "cpu"},
            activations={"recompute": 0},
        )
    for part in (
        r"prefetch=1 has no effect in stage 2",
        r"clip_grad_norm=-1.0 must be a positive number",
        r"precision.parameters='bf61' is unknown (did you mean 'bf16'?)",
        r"precision.cast_inputs='no' must be True or False",
        r"offload.threads=0 must be a whole number, at least 1",
        r"offload.parameters='cpu' has no effect in stage 2",
        r"activations has no effect with recompute, partition and offload all off",
    ):
        assert str(caught.value).count(part) == 1, part
    assert_untouched(model, optimizer)


def test_an_unknown_option_is_told_beside_bad_values() -> None:
    model, optimizer = built()
    refuse(
        model, optimizer, r"(?s)'stages'.*did you mean 'stage'.*prefetch=-1 must be", TypeError, stages=2, prefetch=-1
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused_and_named() -> None:
    model = net()
    refuse(model, sgd(model.parameters()), r"device=.*cuda", device="cuda")


@pytest.mark.parametrize("options", [{"clip_grad_norm": 1.0}, {"elementwise": True}], ids=str)
def test_an_option_of_the_optimizer_is_refused_where_there_is_none(options: dict[str, Any]) -> None:
    model = net().requires_grad_(False)
    refuse(model, None, rf"{next(iter(options))}.*optimizer", **options)


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, 3, nn.Parameter(torch.ones(2)), nn.Linear], ids=lambda value: str(type(value)))
def test_what_is_no_model_is_refused(model: Any) -> None:
    refuse(model, None, r"torch\.nn\.Module", TypeError)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(), nn.ModuleList([nn.ReLU()])], ids=repr)
def test_a_model_without_parameters_is_refused(model: nn.Module) -> None:
    refuse(model, None, "no parameters")


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_is_sharded_once(stage: int) -> None:
    model, sharded = zeroshard.shard(*built(), stage=stage)
    refuse(model, sgd(model.parameters()), "sharded already.*once", stage=stage)
    train(model, sharded, 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_with_a_sharded_part_is_refused(stage: int) -> None:
    model = net()
    zeroshard.shard(model.blocks[1], sgd(model.blocks[1].parameters()), stage=stage)
    refuse(model, sgd(model.parameters()), "sharded already", stage=stage)
    refuse(nn.Sequential(nn.Linear(2, 2), model), None, "sharded already")


@pytest.mark.parametrize("stage", STAGES)
def test_a_part_of_a_sharded_model_is_refused(stage: int) -> None:
    model, _ = zeroshard.shard(*built(), stage=stage)
    refuse(model.blocks[0], sgd(model.blocks[0].parameters()), "sharded already", stage=stage)


def test_a_model_that_shares_a_parameter_with_a_sharded_one_is_refused() -> None:
    first, second = net(), net()
    second.last.weight = first.last.weight
    zeroshard.shard(first, sgd(first.parameters()))
    refuse(second, sgd(second.parameters()), "sharded already")


def test_parameters_on_several_devices_are_refused() -> None:
    model = net()
    model.last = nn.Linear(13, 5, device="meta")
    refuse(model, sgd(model.parameters()), r"several devices \(cpu, meta\)")


def test_a_buffer_without_values_beside_parameters_with_values_is_refused() -> None:
    model = net()
    model.register_buffer("table", torch.empty(3, device="meta"))
    refuse(model, sgd(model.parameters()), r"table.*meta|meta.*table")


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.Embedding(5, 3, sparse=True), lambda: nn.EmbeddingBag(5, 3, sparse=True)],
    ids=["Embedding", "EmbeddingBag"],
)
def test_sparse_gradients_are_refused_and_the_module_is_named(layer: Callable[[], nn.Module]) -> None:
    model = nn.ModuleDict({"words": layer(), "head": nn.Linear(3, 2)})
    refuse(model, sgd(model.parameters()), r"'words'.*sparse=False")


def test_a_sparse_gradient_that_nobody_could_foresee_raises_in_backward_and_is_named() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.embedding(x, self.table, sparse=True)

    model = Sparse()
    model, _ = zeroshard.shard(model, sgd(model.parameters()))
    with pytest.raises(RuntimeError, match=r"'table'.*sparse"):
        model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_parameters_that_are_not_real_numbers_are_refused_and_named(
    dtype: torch.dtype, stage: int, precision: str | None
) -> None:
    model = net()
    model.codes = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    refuse(model, sgd(model.parameters()), "'codes'", stage=stage, precision=precision)
    frozen = nn.ModuleDict({"table": nn.Module()})
    frozen.table.codes = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    refuse(frozen, None, r"'table\.codes'", stage=stage, precision=precision)


def test_what_was_made_in_inference_mode_cannot_be_trained_and_is_refused() -> None:
    model, optimizer = built()
    with torch.inference_mode():
        refuse(model, optimizer, "call it outside")
        other = net()
        shared = torch.zeros(4)
    refuse(other, sgd(other.parameters()), r"'first\.weight' was made under torch\.inference_mode.*outside that mode")
    twice = net()
    twice.register_buffer("a", shared)
    twice.register_buffer("b", shared.view(2, 2))
    refuse(twice, sgd(twice.parameters()), r"'a' and 'b' were made under torch\.inference_mode.*share their memory")
    assert_untouched(model, optimizer)


# -- optimizers -------------------------------------------------------------------------------------------------------


def built(make: Callable[[Any], Any] = sgd) -> tuple[Net, torch.optim.Optimizer]:
    model = net()
    return model, make(model.parameters())


def test_an_optimizer_over_another_models_parameters_is_refused() -> None:
    model, optimizer = built()
    other = net()
    refuse(model, sgd(other.parameters()), r"16|parameters are not the model's.*model\.parameters\(\)")
    refuse(model, sgd([*model.parameters(), nn.Parameter(torch.ones(1))]), "1 of the optimizer's")
    assert_untouched(model, optimizer)


def test_a_trainable_parameter_that_no_group_holds_is_refused_and_named() -> None:
    model = net()
    some = [p for name, p in model.named_parameters() if name != "last.bias"]
    refuse(model, sgd(some), r"'last\.bias'.*requires_grad_\(False\)")
    refuse(model, sgd(some[:-1]), r"'last\.weight' \(and 1 more\)")
    model.last.bias.requires_grad_(False)
    zeroshard.shard(model, sgd(some))


def test_a_model_to_be_trained_needs_an_optimizer() -> None:
    model = net()
    refuse(model, None, r"optimizer=None.*'first\.weight'.*requires_grad_\(False\)")
    model.requires_grad_(False)
    model.last.bias.requires_grad_(True)
    refuse(model, None, r"'last\.bias'")


def test_a_frozen_model_needs_none() -> None:
    model = net().requires_grad_(False)
    refuse(model, sgd(model.parameters()), "leave the optimizer out")
    expected = net()(batch(0))
    model, optimizer = zeroshard.shard(model)
    assert optimizer is None
    assert torch.equal(model(batch(0)), expected)


@pytest.mark.parametrize("optimizer", [3, "adamw", torch.optim.SGD, [torch.ones(2)]], ids=str)
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    refuse(net(), optimizer, r"torch\.optim\.Optimizer", TypeError)


def test_a_sharded_optimizer_is_not_sharded_again() -> None:
    _, sharded = zeroshard.shard(*built())
    refuse(net(), sharded, "sharded already")


def test_the_handle_of_a_sharded_optimizer_does_not_serve_another_model() -> None:
    model, old = built()
    zeroshard.shard(model, old)
    refuse(net(), old, "not the model's")


NOT_ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": torch.optim.LBFGS,
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2]),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters)),
}


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_an_optimizer_that_looks_at_more_than_one_element_is_refused_whatever_one_says(
    name: str, elementwise: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    refuse(model, NOT_ELEMENTWISE[name](model.parameters()), f"{name}.*AdamW", elementwise=elementwise)


class SignDescent(torch.optim.Optimizer):
    """An optimizer of the user's own, which treats each element by itself."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class SubclassedAdamW(torch.optim.AdamW):
    """Not AdamW: nobody knows what it does."""


@pytest.mark.parametrize("kind", [SignDescent, SubclassedAdamW])
def test_an_unknown_optimizer_needs_the_users_word(kind: type[torch.optim.Optimizer]) -> None:
    model, optimizer = built(kind)
    refuse(model, optimizer, f"{kind.__name__}.*elementwise=True")


@in_stages
@pytest.mark.parametrize("kind", [SignDescent, SubclassedAdamW])
@on_ranks(2)
def test_an_unknown_optimizer_trains_on_the_users_word(stages: Stages, kind: type[torch.optim.Optimizer]) -> None:
    plain, optimizer = built(kind)
    ddp = nn.parallel.DistributedDataParallel(plain)
    for step in range(2):
        train(ddp, optimizer, step)
    for stage in stages:
        model, sharded = zeroshard.shard(*built(kind), stage=stage, elementwise=True)
        for step in range(2):
            train(model, sharded, step)
        ours = zeroshard.full_state_dict(model)
        assert all(torch.equal(ours[name], value) for name, value in plain.state_dict().items())


def test_an_optimizer_to_differentiate_through_is_refused() -> None:
    refuse(*built(lambda parameters: torch.optim.Adam(parameters, differentiable=True)), "differentiable=True")


def test_tensor_parallelism_of_cuda_tensors_over_gloo_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="use NCCL, with a GPU for each rank"):
        warn_of_gloo("gloo", torch.device("cuda"), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_gloo("gloo", torch.device("cuda"), 1)
        warn_of_gloo("nccl", torch.device("cuda"), 2)
        warn_of_gloo("gloo", torch.device("cpu"), 2)
