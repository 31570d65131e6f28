"""Numbers that training cannot go on from count as damage: named, before anything is loaded, and an older one helps."""

from __future__ import annotations

import math
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.models import loss_of, net
from tests.ranks import Pool
from tests.storage.forging import forge, index_of
from tests.storage.runs import difference
from zeroshard import CheckpointError
from zeroshard.config.optimizers import NOT_NEGATIVE, SUPPORTED
from zeroshard.storage.format import DTYPES, INDEX, Entry, data_file

NAN, INF = {"$": "float", "value": "nan"}, {"$": "float", "value": "inf"}


def made(kind: Any = torch.optim.AdamW, seed: int = 0, shard: Any = None, **settings: Any) -> tuple[Any, Any]:
    model = net(depth=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += seed
    return zeroshard.shard(model, kind(model.parameters(), **{"lr": 1e-2, **settings}), **(shard or {"stage": 2}))


def train(model: Any, optimizer: Any, steps: int = 1) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "saved"
    model, optimizer = made()
    train(model, optimizer, 2)
    zeroshard.save(folder, model, optimizer)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def everything(model: Any, optimizer: Any) -> Any:
    return zeroshard.full_state_dict(model), optimizer.state_dict()


def refused(folder: Path, match: str, model: Any = None, optimizer: Any = None, **options: Any) -> None:
    """Loading names the file and the entry, and leaves everything as it was."""
    if model is None:
        model, optimizer = made(seed=1)
    train(model, optimizer)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError, match=rf"{match}.*nothing was loaded"):
        zeroshard.load(folder, model, optimizer, **options)
    assert difference(everything(model, optimizer), before) is None
    train(model, optimizer)


def write_element(folder: Path, name: str, kind: str, number: float, place: int = 0) -> None:
    """Changes one element of a range, and its checksum with it."""
    value = index_of(folder)
    part = value["parts"][0]
    entry = next(entry for entry in part["entries"] if (entry["name"], entry["kind"]) == (name, kind))
    there = Entry.from_json(entry)
    with open(folder / data_file(0), "r+b") as file:
        file.seek(part["header"] + there.offset)
        elements = torch.frombuffer(bytearray(file.read(there.nbytes)), dtype=DTYPES[entry["dtype"]])
        elements[place] = number
        raw = bytes(elements.view(torch.uint8).tolist())
        file.seek(part["header"] + there.offset)
        file.write(raw)
    entry["crc32"] = [zlib.crc32(raw)]
    forge(folder, lambda _: value)


# -- elements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["value", "state exp_avg", "state exp_avg_sq"])
def test_elements_that_are_not_finite_are_refused_unless_allowed(kind: str, number: float, saved: Path) -> None:
    write_element(saved, "last.weight", kind, number, place=3)
    if (kind, number) == ("state exp_avg_sq", math.inf):  # after one huge gradient: the element is not updated any more
        zeroshard.load(saved, *made(seed=1))
        return
    refused(saved, rf"{data_file(0)}: 'last.weight' \({kind}\) has NaN or infinite elements.*allow_nonfinite=True")
    model, optimizer = made(seed=1)
    if (kind, number) == ("state exp_avg_sq", -math.inf):
        refused(saved, r"'last.weight' \(state exp_avg_sq\) has elements below 0", allow_nonfinite=True)
        return
    zeroshard.load(saved, model, optimizer, allow_nonfinite=True)
    if kind == "value":
        loaded = zeroshard.full_state_dict(model)["last.weight"].reshape(-1)[3].item()
        assert loaded == number or (math.isnan(loaded) and math.isnan(number))


def test_a_model_without_optimizer_is_looked_at_too(saved: Path) -> None:
    write_element(saved, "first.bias", "value", math.nan)
    model, _ = made(seed=1)
    with pytest.raises(CheckpointError, match=r"'first.bias' \(value\) has NaN.*nothing was loaded"):
        zeroshard.load(saved, model)
    write_element(saved, "first.bias", "value", 0.0)
    write_element(saved, "first.bias", "state exp_avg", math.nan)
    zeroshard.load(saved, model)  # states are not read then


def test_large_elements_are_finite(saved: Path) -> None:
    write_element(saved, "first.bias", "value", 3e38)
    model, optimizer = made(seed=1)
    zeroshard.load(saved, model, optimizer)
    assert zeroshard.full_state_dict(model)["first.bias"][0] == torch.tensor(3e38)


@pytest.mark.parametrize("kind", sorted(SUPPORTED, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_a_negative_variance_is_refused_for_every_optimizer(kind: Any, tmp_path: Path) -> None:
    options = {"amsgrad": True} if kind in (torch.optim.Adam, torch.optim.AdamW) else {}
    model, optimizer = made(kind, **options)
    train(model, optimizer, 2)
    path = tmp_path / "saved"
    zeroshard.save(path, model, optimizer)
    for state in NOT_NEGATIVE & set(SUPPORTED[kind].under(options)):
        shutil.copytree(path, tmp_path / state)
        write_element(tmp_path / state, "last.bias", f"state {state}", -1.0)
        match = rf"'last.bias' \(state {state}\) has elements below 0"
        refused(tmp_path / state, match, *made(kind, seed=1, **options), allow_nonfinite=True)
    zeroshard.load(path, *made(kind, seed=1, **options))


def test_a_mask_among_the_buffers_may_be_infinite(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    model.register_buffer("mask", torch.full((4, 4), -math.inf))
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
    zeroshard.save(tmp_path / "saved", model, optimizer)
    zeroshard.load(tmp_path / "saved", model, optimizer)


def of_two_ranks(folder: str) -> None:
    model, optimizer = made(shard={"stage": 3})
    train(model, optimizer)
    for step in range(2):
        zeroshard.save(f"{folder}/step-{step}", model, optimizer, extra=step)
    before = everything(model, optimizer)
    if torch.distributed.get_rank() == 0:
        write_element(Path(folder, "step-1"), "first.weight", "state exp_avg", math.nan)
        marker = Path(folder, "step-0", "COMPLETE")
        forge(marker.parent, lambda v: None)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"rank \d: .*'first.weight' \(state exp_avg\) has NaN.*nothing was"):
        zeroshard.load(f"{folder}/step-1", model, optimizer)
    assert difference(everything(model, optimizer), before) is None
    assert zeroshard.load(folder, model, optimizer, allow_older=True) == 0


def test_an_element_that_one_rank_reads_is_refused_on_all(tmp_path: Path) -> None:
    Pool.shared().run(of_two_ranks, 2, {"folder": str(tmp_path)})


# -- settings and steps ---------------------------------------------------------------------------------------------


def setting(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda v: v["parts"][0]["values"]["shared"]["groups"][0]["settings"].update({name: value})


def step(value: Any) -> Callable[[Any], Any]:
    return lambda v: [scalars.update(step=value) for scalars in v["parts"][0]["scalars"].values()] and None


def tensor(value: float, dtype: torch.dtype = torch.float32) -> Any:
    from zeroshard.storage.values import encode

    return encode(torch.tensor(value, dtype=dtype), "", lambda _: "")


def moment_among_scalars(index: Any) -> None:
    index["parts"][0]["scalars"]["first.weight"]["exp_avg"] = 5


FORGERIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "infinite weight decay": (setting("weight_decay", INF), r"settings\.weight_decay is inf, not a finite number"),
    "negative weight decay": (setting("weight_decay", -1.0), r"settings\.weight_decay is -1\.0"),
    "weight decay of NaN": (setting("weight_decay", NAN), r"settings\.weight_decay is nan, not a number"),
    "betas above 1": (setting("betas", [7, 9]), r"settings\.betas\[0\] is 7, not a number from 0 to below 1"),
    "a beta of 1": (setting("betas", [0.9, 1.0]), r"settings\.betas\[1\] is 1\.0"),
    "a negative learning rate": (setting("lr", -1e-3), r"settings\.lr is -0\.001, not a finite number, 0 or more"),
    "a learning rate of 400 digits": (setting("lr", 10**400), r"settings\.lr is .*, not a finite number"),
    "a learning rate that fp32 has not": (setting("lr", 1e300), r"settings\.lr is 1e\+300"),
    "weight decay of 400 digits": (setting("weight_decay", 10**400), r"settings\.weight_decay is "),
    "a negative eps": (setting("eps", -1e-8), r"settings\.eps is -1e-08"),
    "an infinite eps": (setting("eps", INF), r"settings\.eps is inf"),
    "an infinite first learning rate": (setting("initial_lr", INF), r"settings\.initial_lr is inf"),
    "a step that is a plain number": (step(3.0), r"'first\.weight'\.step is 3\.0, not a tensor"),
    "a step that is a plain count": (step(3), r"'first\.weight'\.step is 3, not a tensor"),
    "a step of 400 digits": (step(10**400), r"'first\.weight'\.step is "),
    "a step of bytes": (step(tensor(3, torch.uint8)), r"'first\.weight'\.step is tensor\(3.*, not a tensor of fp32"),
    "a negative step": (step(tensor(-1)), r"'first\.weight'\.step is tensor\(-1\.\), not a count of steps"),
    "half a step": (step(tensor(1.5)), r"'first\.weight'\.step is tensor\(1\.5.*, not a count of steps"),
    "a step of NaN": (step(tensor(math.nan)), r"'first\.weight'\.step is tensor\(nan\), not a number"),
    "a moment among scalars": (moment_among_scalars, r"'first\.weight'\.exp_avg is 5, not a scalar"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_settings_and_steps_that_break_the_next_step_are_refused(what: str, saved: Path) -> None:
    edit, match = FORGERIES[what]
    forge(saved, edit)
    refused(saved, rf"{INDEX}: .*{match}")


@pytest.mark.parametrize("what", ["betas above 1", "a learning rate of 400 digits", "half a step"])
def test_an_older_checkpoint_is_taken_in_its_place(what: str, tmp_path: Path) -> None:
    model, optimizer = made()
    for number in range(2):
        train(model, optimizer)
        zeroshard.save(tmp_path / f"step-{number}", model, optimizer, extra=number)
    forge(tmp_path / "step-0", lambda v: None)
    forge(tmp_path / "step-1", FORGERIES[what][0])
    assert zeroshard.load(tmp_path, model, optimizer, allow_older=True) == 0


GOOD: dict[Any, list[dict[str, Any]]] = {
    torch.optim.AdamW: [{"lr": 0.0}, {"weight_decay": 0.0}, {"weight_decay": 0}, {"eps": 0.0}, {"betas": (0.0, 0.0)}],
    torch.optim.SGD: [{"lr": 0}, {"momentum": 0.9, "dampening": -0.5}, {"lr": 5.0}],
    torch.optim.ASGD: [{"t0": math.inf}, {"alpha": -0.5}, {"lambd": 0.0}],
    torch.optim.Rprop: [{"step_sizes": (0.0, math.inf)}, {"etas": (0.4, 1.5)}],
    torch.optim.RMSprop: [{"alpha": 0.0}, {"alpha": 1.0}],
    torch.optim.Adadelta: [{"rho": 1.0}, {"rho": 0.0}],
}


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
def test_settings_that_torch_takes_are_loaded(kind: Any, tmp_path: Path) -> None:
    for number, settings in enumerate(GOOD[kind]):
        model, optimizer = made(kind)
        train(model, optimizer)
        for group in optimizer.param_groups:
            group.update(settings)
        zeroshard.save(tmp_path / str(number), model, optimizer)
        other, loaded = made(kind, seed=1)
        zeroshard.load(tmp_path / str(number), other, loaded)
        assert {key: loaded.param_groups[0][key] for key in settings} == settings


# -- schedulers -----------------------------------------------------------------------------------------------------


def schedulers(optimizer: Any) -> dict[str, Any]:
    rates = torch.optim.lr_scheduler
    return {
        "one": rates.StepLR(optimizer, 2),
        "milestones": rates.MultiStepLR(optimizer, [2, 4]),
        "plateau": rates.ReduceLROnPlateau(optimizer),
        "function": rates.LambdaLR(optimizer, lambda step: 1.0),
        "several": rates.SequentialLR(
            optimizer, [rates.ConstantLR(optimizer), rates.ExponentialLR(optimizer, 0.9)], [2]
        ),
    }


@pytest.mark.parametrize("what", ["one", "milestones", "plateau", "function", "several"])
def test_a_scheduler_takes_only_entries_that_it_has(what: str, tmp_path: Path) -> None:
    model, optimizer = made()
    zeroshard.save(tmp_path / "saved", model, optimizer, scheduler=schedulers(optimizer)[what])
    model, optimizer = made(seed=1)
    scheduler = schedulers(optimizer)[what]
    zeroshard.load(tmp_path / "saved", model, optimizer, scheduler=scheduler)
    forge(tmp_path / "saved", lambda v: v["parts"][0]["values"]["scheduler"].update(step=0))
    refused(tmp_path / "saved", "has scheduler with 'step', which", model, optimizer, scheduler=scheduler)
    assert callable(scheduler.step)


def test_a_scheduler_inside_another_takes_only_entries_that_it_has(tmp_path: Path) -> None:
    model, optimizer = made()
    scheduler = schedulers(optimizer)["several"]
    zeroshard.save(tmp_path / "saved", model, optimizer, scheduler=scheduler)
    forge(
        tmp_path / "saved",
        lambda v: v["parts"][0]["values"]["scheduler"]["_schedulers"][1].update(get_lr=0, step=0),
    )
    match = r"has scheduler\._schedulers\[1\] with 'get_lr', 'step'"
    refused(tmp_path / "saved", match, model, optimizer, scheduler=scheduler)


@pytest.mark.parametrize("value", ["soon", 10**30, [1], True], ids=str)
def test_a_schedulers_entry_of_another_kind_is_refused(value: object, tmp_path: Path) -> None:
    model, optimizer = made()
    scheduler = schedulers(optimizer)["one"]
    scheduler.last_epoch = value
    zeroshard.save(tmp_path / "saved", model, optimizer, scheduler=scheduler)
    model, optimizer = made(seed=1)
    with pytest.raises(zeroshard.CheckpointError, match=r"scheduler\.last_epoch that is .* where this run has 0"):
        zeroshard.load(tmp_path / "saved", model, optimizer, scheduler=schedulers(optimizer)["one"])


def test_a_scheduler_may_lack_entries_of_a_newer_torch(tmp_path: Path) -> None:
    model, optimizer = made()
    scheduler = schedulers(optimizer)["one"]
    zeroshard.save(tmp_path / "saved", model, optimizer, scheduler=scheduler)
    forge(tmp_path / "saved", lambda v: v["parts"][0]["values"]["scheduler"].pop("_step_count") and None)
    zeroshard.load(tmp_path / "saved", model, optimizer, scheduler=scheduler)
