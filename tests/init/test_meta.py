"""Models on the meta device get the weights that the unsharded model would, and are never whole anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.matrix import matrix, slow
from tests.models import Block, Net, batch, loss_of
from tests.ranks import Pool, on_ranks


def on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


def shard(model: nn.Module, **options: Any) -> Any:
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()), **options)[0]


def assert_state(model: nn.Module, expected: dict[str, Tensor]) -> None:
    state = zeroshard.full_state_dict(model)
    assert state.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(state[name], value)] == []


def by_the_loop(build: Callable[[], nn.Module], initialise: Callable[[nn.Module], object] | None = None) -> nn.Module:
    """The loop on the unsharded model."""
    model: nn.Module = on_meta(build).to_empty(device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if initialise is not None:
                initialise(module)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return model


# -- the same weights -------------------------------------------------------------------------------------------------


def check_net() -> None:
    expected = by_the_loop(Net).state_dict()
    state_after = torch.get_rng_state()
    for stage in (0, 1, 2, 3):
        model = on_meta(Net)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters)
        torch.manual_seed(5 + (dist.get_rank() if stage == 3 else 0))  # rank 0's weights count
        model, sharded = zeroshard.shard(model, optimizer, stage=stage)
        if stage < 3:
            assert torch.equal(torch.get_rng_state(), state_after)
        assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
        assert_state(model, expected)
        loss_of(model, 0).backward()
        sharded.step()
        after = zeroshard.full_state_dict(model)
        assert not torch.equal(after["blocks.1.up.weight"], expected["blocks.1.up.weight"])


@pytest.mark.parametrize("world", [slow(1), 2, slow(3)])
def test_one_seed_gives_the_same_weights_in_every_stage_and_world(world: int) -> None:
    Pool.shared().run(check_net, world, {})


@on_ranks(2)
def test_parameters_are_drawn_in_the_dtype_that_the_model_was_built_with() -> None:
    for build in (Net, lambda: Net().bfloat16()):
        for stage in (0, 3):
            model = on_meta(build)
            model.blocks[1].requires_grad_(False)
            torch.manual_seed(5)
            shard(model, stage=stage, precision="bf16")
            assert_state(model, by_the_loop(build).bfloat16().state_dict())


class Residual(nn.Module):
    """Parents that set what their children hold: one before them, one after the unit of the child has been left."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.scales = nn.ParameterList([torch.ones(3), torch.ones(2)])
        self.last = nn.Linear(5, 5)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3))


class GPT(nn.Module):
    """As nanoGPT and Hugging Face write it: ``_init_weights`` on each module, children before parents, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=3)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        if isinstance(module, Block):
            nn.init.normal_(module.down.weight, std=0.001)
        if module is self:
            self.blocks[0].up.weight.mul_(2)


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_parent_may_set_what_its_children_hold(stage: int) -> None:
    model = on_meta(Residual)
    torch.manual_seed(5)
    shard(model, stage=stage)
    assert_state(model, by_the_loop(Residual).state_dict())

    model = on_meta(GPT)
    torch.manual_seed(5)
    shard(model, stage=stage, precision="bf16")
    expected = on_meta(GPT).to_empty(device="cpu")
    expected.head.weight = expected.embed.weight  # to_empty() unties
    torch.manual_seed(5)
    with torch.no_grad():
        expected.apply(expected._init_weights)
    assert expected.blocks[1].down.weight.std() < 0.002
    assert_state(model, expected.bfloat16().state_dict())
    assert model.embed.weight is model.head.weight
    assert zeroshard.stats(model).volume_elements == 0


@on_ranks(2)
def test_attention_of_torch_is_initialised_as_when_it_is_built() -> None:
    model = on_meta(Attending)
    shard(model)
    state = zeroshard.full_state_dict(model)
    assert not state["layers.1.self_attn.in_proj_bias"].any()
    assert not state["layers.1.self_attn.out_proj.bias"].any()
    bound = (6 / (8 + 3 * 8)) ** 0.5  # Xavier's
    assert 0.8 * bound < state["layers.1.self_attn.in_proj_weight"].abs().max() < bound


@on_ranks(2)
def test_attributes_of_parameters_and_buffers_survive() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model[0].weight.no_decay = True
    mean = model[1].running_mean
    shard(model)
    assert model[0].weight.no_decay
    assert model[1].running_mean is mean
    assert torch.equal(model[1].running_var, torch.ones(3))


# -- the user's own initialiser ---------------------------------------------------------------------------------------


def by_size(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=1 / parameter.numel())


@on_ranks(2)
def test_init_is_called_on_every_module_in_order() -> None:
    seen: list[nn.Module] = []
    model = on_meta(Net)
    torch.manual_seed(5)
    shard(model, init=lambda module: (seen.append(module), by_size(module)))
    assert seen == list(model.modules())
    assert_state(model, by_the_loop(Net, by_size).state_dict())


@on_ranks(2)
def test_init_may_act_on_rank_0_alone() -> None:
    def by_rank_0(module: nn.Module) -> None:
        if dist.get_rank() == 0:
            by_size(module)

    model = on_meta(Net)
    torch.manual_seed(5)
    shard(model, init=by_rank_0)
    assert_state(model, by_the_loop(Net, by_size).state_dict())


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_empty_gives_memory_and_finite_values_for_dry_runs(stage: int) -> None:
    class Bare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))
            self.shift = nn.Parameter(torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale + self.shift

    model = on_meta(Bare)
    optimizer = torch.optim.AdamW(model.parameters())
    model, sharded = zeroshard.shard(model, optimizer, stage=stage, init="empty")
    model(batch(0)).sum().backward()
    sharded.step()
    assert all(bool(value.isfinite().all()) for value in zeroshard.full_state_dict(model).values())


# -- refusals ---------------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.arange(3.0), persistent=False)
        self.register_buffer("positions", torch.arange(3), persistent=False)


class Half(nn.Module):
    """Sets its weight; forgets the mask it built, and a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2))
        self.other = nn.Parameter(torch.empty(3, 2))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.ones_(self.other[:2])


class Quiet(nn.Module):
    """Knows how to initialise some of its modules, and says nothing about the others."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.unknown, self.rotary = nn.Linear(2, 2), Bare(), Rotary()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def refuse(model: nn.Module, match: str, **options: Any) -> None:
    was = [(name, tensor, tensor.device) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    with pytest.raises(ValueError, match=match):
        shard(model, **options)
    now = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(now[name] is tensor and tensor.device == device for name, tensor, device in was)


@on_ranks(2)
def test_all_modules_and_buffers_without_an_initialiser_are_named_at_once() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Bare(), Rotary()))
    refuse(model, r"module '1' \(Bare\): weight; module '2' \(Rotary\): inverse, positions\..*reset_parameters.*init=")
    refuse(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Half())), r"module '1' \(Half\): other, mask\.")
    refuse(on_meta(Quiet), r"'unknown' \(Bare\): weight; module 'rotary' \(Rotary\): inverse, positions")
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Conv1d(2, 2, 1)))
    refuse(model, r"module '1' \(Conv1d\): weight, bias", init=lambda m: isinstance(m, nn.Linear) and by_size(m))
    shard(model)  # when the mistake is mended


@on_ranks(2)
def test_a_buffer_that_has_values_needs_no_initialiser() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Rotary()))
    model[2].inverse, model[2].positions = torch.ones(3), torch.arange(3)
    shard(model)
    assert torch.equal(model[2].inverse, torch.ones(3))


@on_ranks(2)
def test_an_initialiser_that_fails_is_named_and_the_model_stays_on_meta() -> None:
    def fail(module: nn.Module) -> None:
        by_size(module)
        if isinstance(module, Block):
            raise ZeroDivisionError("mine")

    model = on_meta(Net)
    with pytest.raises(ZeroDivisionError) as caught:
        shard(model, init=fail)
    assert "'blocks.0'" in caught.value.__notes__[0]
    assert all(p.is_meta and p.dtype is torch.float32 for p in model.parameters())
    shard(model, precision="bf16")


@on_ranks(2)
def test_init_without_effect_is_refused() -> None:
    refuse(Net(), r"init='empty' has no effect on a model that has values", init="empty")
    refuse(Net(), r"init=.*has no effect on a model that has values", init=by_size)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reset_parameters", "_init_weights"])
@on_ranks(2)
def test_a_model_on_meta_is_never_whole_anywhere_in_stage_3(method: str) -> None:
    largest = 0

    class Watched(Net):
        def __init__(self) -> None:
            super().__init__(width=32, depth=8)

    def watched(self: Net, module: nn.Module) -> None:
        nonlocal largest
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        with torch._C.DisableTorchFunction():
            whole = [p for p in model.parameters() if not p.is_meta and p.untyped_storage().nbytes() >= 4 * p.numel()]
            largest = max(largest, sum(p.numel() for p in whole))

    if method == "_init_weights":
        Watched._init_weights = watched  # type: ignore[attr-defined]
    model = on_meta(Watched)
    total = sum(p.numel() for p in model.parameters())
    init = None if method == "_init_weights" else lambda module: watched(model, module)
    shard(model, init=init)
    assert 0 < largest < total / 4


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def hugging_face(name: str, tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    common: dict[str, Any] = {"vocab_size": 37, "pad_token_id": 1, "tie_word_embeddings": tied}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=8, n_layer=3, n_head=2, n_positions=16, **common)
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    common |= {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))  # type: ignore[no-any-return]
    return transformers.BertForMaskedLM(transformers.BertConfig(**common))  # type: ignore[no-any-return]


@matrix(name=("gpt2", "llama", "bert"), tied=(False, True))
def test_a_hugging_face_model_gets_the_weights_of_its_own_initialisation(name: str, tied: bool) -> None:
    pytest.importorskip("transformers")
    Pool.shared().run(check_hugging_face, 2, {"name": name, "tied": tied})


def check_hugging_face(name: str, tied: bool) -> None:
    expected: Any = on_meta(lambda: hugging_face(name, tied)).to_empty(device="cpu")
    expected.tie_weights()  # to_empty() unties
    torch.manual_seed(5)
    expected.initialize_weights()
    for stage in (1, 3):
        model = on_meta(lambda: hugging_face(name, tied))
        torch.manual_seed(5)
        shard(model, stage=stage)
        assert_state(model, expected.state_dict())
        buffers = dict(model.named_buffers())
        assert all(torch.equal(buffers[key], value) for key, value in expected.named_buffers())
        tokens = torch.arange(6).view(1, 6)
        assert torch.equal(model.eval()(tokens).logits, expected.eval()(tokens).logits)
