"""``weights=``: safetensors go from disk straight into shards, and everything that does not fit is named."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zeroshard
from tests.matrix import slow
from tests.models import Block, Net, loss_of, net
from tests.ranks import Pool, on_ranks
from zeroshard.init.joined import Conversions


class Tied(nn.Module):
    """Tied weights, a scalar, an empty parameter, buffers of both kinds and of several dtypes."""

    def __init__(self, rotary: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.rotary = Rotary() if rotary else nn.Identity()


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.arange(3.0), persistent=False)
        self.weight = nn.Parameter(torch.ones(2))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.inverse = torch.arange(3.0)


def on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


def shard(model: nn.Module, **options: Any) -> Any:
    return zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)[0]


@contextmanager
def folder_on_rank_0() -> Iterator[Path]:
    """One folder that all ranks see."""
    names = [tempfile.mkdtemp(prefix="weights-")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])


def write(folder: Path, state: dict[str, Tensor], files: int = 1) -> None:
    """As Hugging Face does, on rank 0."""
    if dist.get_rank() == 0:
        names = list(state)
        if files == 1:
            save_file({name: state[name].contiguous().clone() for name in names}, folder / "model.safetensors")
        else:
            place_of = {name: f"model-{number % files}.safetensors" for number, name in enumerate(names)}
            for file in set(place_of.values()):
                held = {name: state[name].contiguous().clone() for name in names if place_of[name] == file}
                save_file(held, folder / file)
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place_of}))
    dist.barrier()


def filled(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(3)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.random_(0, 100)
    return dict(model.state_dict())


def assert_state(model: nn.Module, expected: dict[str, Tensor]) -> None:
    state = zeroshard.full_state_dict(model)
    assert state.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(state[name], value)] == []


# -- the values -------------------------------------------------------------------------------------------------------


def check(stage: int) -> None:
    state = filled(Tied())
    with folder_on_rank_0() as folder:
        write(folder, state, files=3)
        for build in (lambda: on_meta(Tied), Tied):
            before = torch.get_rng_state()
            model = build()
            parameters = list(model.parameters())
            shard(model, stage=stage, weights=folder)
            assert build is Tied or torch.equal(torch.get_rng_state(), before)
            assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
            assert_state(model, state)
            assert torch.equal(model.rotary.inverse, torch.arange(3.0))
            assert model.head.weight is model.embed.weight


@pytest.mark.parametrize(("world", "stage"), [(1, 3), slow(2, 0), (2, 1), slow(2, 2), (2, 3), slow(3, 3)])
def test_a_sharded_model_has_the_values_on_disk(world: int, stage: int) -> None:
    Pool.shared().run(check, world, {"stage": stage})


@on_ranks(2)
def test_training_goes_on_from_the_values_on_disk() -> None:
    with folder_on_rank_0() as folder:
        write(folder, net().state_dict())
        after = []
        for model, options in ((net(), {}), (on_meta(Net), {"weights": folder / "model.safetensors"})):
            model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), **options)
            for step in range(2):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            after.append(zeroshard.full_state_dict(model))
        assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


@on_ranks(2)
def test_dtypes_are_converted_and_masters_keep_what_the_file_has() -> None:
    torch.manual_seed(4)
    state = Net().double().state_dict()
    with folder_on_rank_0() as folder:
        write(folder, state)
        model = on_meta(Net)
        model.blocks[0].requires_grad_(False)
        shard(model, weights=folder, precision="bf16")
        assert_state(model, {name: value.float().bfloat16() for name, value in state.items()})
        up = next(f for f in zeroshard.runtime.runtime_of(model).units[2].flats if f.trainable)
        piece, tensor = next(iter(up.pieces.items()))
        slot = up.layout.slots[piece.slot]
        expected = state[slot.name].float().flatten()[piece.start : piece.stop]
        assert torch.equal(tensor, expected)


@on_ranks(2)
def test_tied_weights_may_be_there_once_or_twice_but_not_differ() -> None:
    state = filled(Tied())
    for left_out in ("head.weight", "embed.weight"):
        with folder_on_rank_0() as folder:
            write(folder, {name: value for name, value in state.items() if name != left_out})
            assert_state(shard(on_meta(Tied), weights=folder), state)
    with folder_on_rank_0() as folder:
        other = state["head.weight"].clone()
        other[-1, -1] += 1  # only one rank sees it
        write(folder, state | {"head.weight": other})
        model = on_meta(Tied)
        with pytest.raises(ValueError, match=r"'embed\.weight' and 'head\.weight' are one tied weight.*differ on disk"):
            shard(model, weights=folder)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@on_ranks(2)
def test_names_that_torch_compile_changed_are_found() -> None:
    state = net().state_dict()
    with folder_on_rank_0() as folder:
        write(folder, state)
        model = on_meta(Net)
        model.blocks[1] = torch.compile(model.blocks[1])
        shard(model, weights=folder)
        found = zeroshard.full_state_dict(model)
        assert torch.equal(found["blocks.1._orig_mod.up.weight"], state["blocks.1.up.weight"])


@on_ranks(2)
def test_init_computes_the_buffers_that_no_file_has() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)

    def mask(module: nn.Module) -> None:
        assert isinstance(module, Plain)
        module.mask.fill_(True)

    state = {f"net.{name}": value for name, value in net().state_dict().items()}
    with folder_on_rank_0() as folder:
        write(folder, state)
        model = on_meta(Plain)
        with pytest.raises(ValueError, match=r"module '\(root\)' \(Plain\): mask\."):
            shard(model, weights=folder)
        shard(model, weights=folder, init=mask)
        assert_state(model, state)
        assert bool(model.mask.all())
    with folder_on_rank_0() as folder:
        write(folder, net().state_dict())
        with pytest.raises(ValueError, match=r"init=.*has no effect: weights= has every"):
            shard(on_meta(Net), weights=folder, init=mask)


# -- refusals ---------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {key: value for key, value in state.items() if key != name}


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (without("blocks.2.up.bias"), r"it lacks 'blocks\.2\.up\.bias'"),
    "unexpected": (lambda state: state | {"blocks.9.up": torch.ones(2)}, r"'blocks\.9\.up', which the model has not"),
    "all": (
        lambda state: {f"model.{name}": value for name, value in state.items()},
        r"it lacks 'first\.weight', .* and \d+ more; it has 'model\.",
    ),
    "shape": (
        lambda state: state | {"last.bias": torch.ones(6)},
        r"'last\.bias' has different shapes: \[6\] in model\.safetensors, \[5\] in the model",
    ),
    "transposed": (lambda state: state | {"last.weight": state["last.weight"].T}, r"'last\.weight' has different"),
    "quantised": (
        lambda state: state | {"last.bias": torch.ones(5, dtype=torch.int8)},
        r"'last\.bias' is I8 in model\.safetensors.*torch\.float32.*dequantised",
    ),
    "eight bits": (
        lambda state: state | {"last.bias": torch.ones(5).to(torch.float8_e4m3fn)},
        r"'last\.bias' is F8_E4M3",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_weights_that_do_not_fit_are_refused_and_named(change: str) -> None:
    alter, match = CHANGES[change]
    with folder_on_rank_0() as folder:
        write(folder, alter(net().state_dict()))
        for model in (on_meta(Net), net()):
            with pytest.raises(ValueError, match=match) as caught:
                shard(model, weights=folder)
            assert str(folder) in str(caught.value)
            if model.first.weight.is_meta:
                assert all(parameter.is_meta for parameter in model.parameters())
            else:
                shard(model)
                assert_state(model, net().state_dict())


def spoil(kind: str, folder: Path) -> Path:
    index = folder / "model.safetensors.index.json"
    file = folder / "model-1.safetensors"
    place_of = json.loads(index.read_text())["weight_map"]
    if kind == "nothing":
        return folder / "not-there"
    if kind == "empty":
        (folder / "deeper").mkdir()
    elif kind == "pickle":
        (folder / "deeper").mkdir()
        (folder / "deeper" / "pytorch_model.bin").write_bytes(b"")
    elif kind == "foreign":
        file.write_bytes(b"GGUF" + bytes(100))
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    elif kind == "unreadable index":
        index.write_text("{")
    elif kind == "other index":
        index.write_text('{"weights": 3}')
    elif kind == "outside":
        index.write_text(json.dumps({"weight_map": place_of | {"last.bias": "../elsewhere.safetensors"}}))
    elif kind == "absolute":
        index.write_text(json.dumps({"weight_map": place_of | {"last.bias": str(file)}}))
    elif kind == "no such file":
        file.unlink()
    elif kind == "elsewhere":
        index.write_text(json.dumps({"weight_map": place_of | {"last.bias": "model-1.safetensors"}}))
    return folder / "deeper" if kind in ("empty", "pickle") else folder


SPOILT = {
    "nothing": r"not-there' is not there; all ranks",
    "empty": r"neither model\.safetensors nor model\.safetensors\.index\.json$",
    "pickle": r"pytorch_model\.bin is a pickle",
    "foreign": r"model-1\.safetensors cannot be read as safetensors",
    "cut": r"model-1\.safetensors cannot be read as safetensors",
    "unreadable index": r"index\.json is no index",
    "other index": r"index\.json is no index.*weight_map",
    "outside": r"'last\.bias' into '\.\./elsewhere\.safetensors', which is outside its folder",
    "absolute": r"'last\.bias' into '/.*', which is outside its folder",
    "no such file": r"into 'model-1\.safetensors', which is not there",
    "elsewhere": r"'last\.bias' is in model-1\.safetensors, which does not have it",
}


@pytest.mark.parametrize("kind", SPOILT)
@on_ranks(2)
def test_files_that_cannot_be_read_are_named(kind: str) -> None:
    state = net().state_dict()
    assert list(state).index("last.bias") % 2 == 1
    state = {"padding": torch.ones(1)} | state  # so that last.bias is in the other file
    with folder_on_rank_0() as folder:
        write(folder, state, files=2)
        paths = [spoil(kind, folder)] if dist.get_rank() == 0 else [folder]
        dist.broadcast_object_list(paths)
        with pytest.raises(ValueError, match=SPOILT[kind]):
            shard(on_meta(Net), weights=paths[0])


@on_ranks(2)
def test_a_rank_that_does_not_see_the_files_is_named_on_all() -> None:
    with folder_on_rank_0() as folder:
        write(folder, net().state_dict())
        here = os.getcwd()
        if dist.get_rank() == 0:
            os.chdir(folder)
        try:
            with pytest.raises(ValueError, match=r"rank 1: weights='model\.safetensors' is not there"):
                shard(on_meta(Net), weights="model.safetensors")
        finally:
            os.chdir(here)


@on_ranks(2)
def test_ranks_that_see_different_files_are_told() -> None:
    with folder_on_rank_0() as folder:
        here = os.getcwd()
        mine = folder / str(dist.get_rank())
        mine.mkdir()
        os.chdir(mine)
        try:
            state = net().state_dict()
            if dist.get_rank() == 1:
                state = {name: value.double() for name, value in state.items()}
            save_file(state, "model.safetensors")
            with pytest.raises(ValueError, match=r"other names, shapes or dtypes on some ranks"):
                shard(on_meta(Net), weights=".")
        finally:
            os.chdir(here)


# -- memory -----------------------------------------------------------------------------------------------------------

MIB = 1 << 20


class Wide(nn.Module):
    """16 blocks of 16 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(16))


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


@pytest.mark.parametrize(("stage", "kept"), [(3, 128), (0, 256)])
@on_ranks(2)
def test_no_rank_holds_more_of_the_host_than_what_it_keeps(stage: int, kept: int) -> None:
    with folder_on_rank_0() as folder:
        ones = torch.ones(2048, 2048)
        write(folder, {f"blocks.{number}.weight": ones * number for number in range(16)}, files=2)
        model = on_meta(Wide)
        model.requires_grad_(False)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not to be used again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        zeroshard.shard(model, stage=stage, weights=folder)
        grown = (resident("VmHWM") - before) / MIB  # pages of mapped files included
        with zeroshard.gathered(model.blocks[15].weight):
            assert float(model.blocks[15].weight[7, 9]) == 15
        assert 0.5 * kept < grown < kept + 2 * 16, f"{grown:.0f} MiB"


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    common: dict[str, Any] = {"vocab_size": 37, "pad_token_id": 1}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=8, n_layer=3, n_head=2, n_positions=16, **common)
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    common |= {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["gpt2", "gpt2 without head", "llama"])
def test_what_hugging_face_saved_is_what_it_would_load(name: str) -> None:
    pytest.importorskip("transformers")
    Pool.shared().run(check_hugging_face, 2, {"name": name})


def check_hugging_face(name: str) -> None:
    expected: Any = hugging_face(name.split()[0])
    with folder_on_rank_0() as folder:
        if dist.get_rank() == 0:
            saved = expected.transformer if name.endswith("head") else expected
            saved.save_pretrained(folder, max_shard_size="6KB")
            assert (folder / "model.safetensors.index.json").exists()
        dist.barrier()
        expected = type(expected).from_pretrained(folder)
        model = on_meta(lambda: hugging_face(name.split()[0]))
        shard(model, weights=folder)
        assert_state(model, expected.state_dict())
        tokens = torch.arange(6).view(1, 6)
        assert torch.equal(model.eval()(tokens).logits, expected.eval()(tokens).logits)


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 12},
    "qwen2_moe": {"num_experts": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 10},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 8, "head_dim": 4},
    "gpt_oss": {"num_local_experts": 3, "head_dim": 4},
    "granitemoe": {"num_local_experts": 3},
}
"""Mixtures of experts, by transformers' name. All but the last two have each expert's tensors in the files."""


def mixture(kind: str) -> Any:
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"vocab_size": 37, "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **sizes, **more, **MIXTURES[kind])
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("mixtral", 3), *(slow(kind, stage) for kind in MIXTURES for stage in (1, 3) if (kind, stage) != ("mixtral", 3))],
)
@on_ranks(2)
def test_experts_of_the_files_are_joined_as_transformers_joins_them(kind: str, stage: int) -> None:
    torch.manual_seed(3)
    with folder_on_rank_0() as folder:
        if dist.get_rank() == 0:
            mixture(kind).save_pretrained(folder, max_shard_size=4000)
        dist.barrier()
        expected = type(mixture(kind)).from_pretrained(folder)
        model = shard(on_meta(lambda: mixture(kind)), stage=stage, weights=folder)
        state = zeroshard.full_state_dict(model)
        assert state.keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            assert torch.equal(state[name], value), name
        tokens = torch.arange(6).view(1, 6)
        with torch.no_grad():
            assert torch.equal(model.eval()(tokens).logits, expected.eval()(tokens).logits)


@pytest.mark.parametrize("kind", ["mixtral", *map(slow, list(MIXTURES)[1:])])
def test_a_model_knows_the_tensors_of_its_files(kind: str, tmp_path: Path) -> None:
    model = mixture(kind)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = {
        part.name: value[part.region]
        for name, value in model.state_dict().items()
        for part in Conversions(model).parts(name, tuple(value.shape))
    }
    assert found.keys() == stored.keys()
    for name, value in found.items():
        assert torch.equal(value, stored[name]), name


def _without_an_expert(state: dict[str, Tensor]) -> None:
    del state["model.layers.1.block_sparse_moe.experts.1.w3.weight"]


def _with_another_shape(state: dict[str, Tensor]) -> None:
    state["model.layers.1.block_sparse_moe.experts.1.w2.weight"] = torch.zeros(8, 13)


def _with_another_dtype(state: dict[str, Tensor]) -> None:
    name = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    state[name] = state[name].half()


def _with_one_expert_less(state: dict[str, Tensor]) -> None:
    for name in [name for name in state if "layers.1.block_sparse_moe.experts.11." in name]:
        del state[name]


def _with_a_number_that_is_none(state: dict[str, Tensor]) -> None:
    name = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    state[name.replace(".1.w2", ".one.w2")] = state.pop(name)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without_an_expert, r"layers\.1\.mlp\.experts\.gate_up_proj' is made of 23 tensors.*some are missing"),
        (_with_another_shape, r"experts\.1\.w2\.weight' is \[8, 13\] in F32, and .* \[8, 12\] in F32; both are parts"),
        (_with_another_dtype, r"experts\.1\.w2\.weight' is \[8, 12\] in F16"),
        (_with_one_expert_less, r"different shapes: \[11, .* in the model"),
        (
            _with_a_number_that_is_none,
            r"'model\.layers\.1\.mlp\.experts\.down_proj' is made of 11 tensors|it has .*one\.w2",
        ),
    ],
)
def test_experts_that_cannot_be_joined_are_refused_and_named(change: Any, told: str, tmp_path: Path) -> None:
    mixture("mixtral").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=told):
        shard(on_meta(lambda: mixture("mixtral")), weights=tmp_path)


def test_weights_that_transformers_would_compute_are_refused_with_the_remedy(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, image_size=4, patch_size=2)
    model = transformers.ViTModel(config)
    state = {name: value for name, value in model.state_dict().items() if "fc1" not in name}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"it lacks '.*fc1.*computes tensors.*from_pretrained\(\) before shard"):
        shard(on_meta(lambda: transformers.ViTModel(config)), weights=tmp_path)
