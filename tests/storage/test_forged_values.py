"""An index whose values somebody edited is refused before anything is written, by file and entry."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.models import loss_of, net
from tests.storage.forging import forge, forge_entries, index_of
from tests.storage.runs import difference
from zeroshard import CheckpointError
from zeroshard.cli.main import main
from zeroshard.config.optimizers import SUPPORTED
from zeroshard.storage.format import INDEX, data_file

KINDS = sorted(SUPPORTED, key=lambda kind: kind.__name__)
NAN = {"$": "float", "value": "nan"}


def made(kind: Any = torch.optim.AdamW, seed: int = 0, shard: Any = None, **settings: Any) -> tuple[Any, Any]:
    model = net(depth=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += seed
    optimizer = kind(model.parameters(), **{"lr": 1e-2, **settings})
    return zeroshard.shard(model, optimizer, **(shard or {"stage": 2}))


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "saved"
    model, optimizer = made()
    train(model, optimizer)
    zeroshard.save(folder, model, optimizer)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def refused(folder: Path, match: str, model: Any, optimizer: Any, **options: Any) -> None:
    """Names the index, and leaves weights, states, settings and random numbers as they were."""
    train(model, optimizer, 1)
    before = zeroshard.full_state_dict(model), optimizer.state_dict(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=rf"(?i)saved.*{match}.*nothing was loaded"):
        zeroshard.load(folder, model, optimizer, **options)
    after = zeroshard.full_state_dict(model), optimizer.state_dict(), torch.get_rng_state()
    assert difference(after, before) is None
    train(model, optimizer, 1)


def values(index: Any) -> Any:
    return index["parts"][0]["values"]


def setting(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda v: values(v)["shared"]["groups"][0]["settings"].update({name: value})


def scalars(value: Any) -> Callable[[Any], Any]:
    return lambda v: v["parts"][0].update(scalars=dict.fromkeys(v["parts"][0]["scalars"], value))


FORGERIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no optimizer": (lambda v: values(v)["shared"].pop("optimizer") and None, "shared lacks 'optimizer'"),
    "no groups": (lambda v: values(v)["shared"].pop("groups") and None, "shared lacks 'groups'"),
    "no progress": (lambda v: values(v)["shared"].pop("progress") and None, "shared lacks 'progress'"),
    "groups are a number": (lambda v: values(v)["shared"].update(groups=5), r"shared\.groups is 5, not a list"),
    "common is a number": (lambda v: values(v)["shared"].update(common=3), r"shared\.common is 3, not a table"),
    "settings are a list": (
        lambda v: values(v)["shared"]["groups"][0].update(settings=[1]),
        r"groups\[0\]\.settings is \[1\], not a table",
    ),
    "parameters are numbers": (
        lambda v: values(v)["shared"]["groups"][0].update(parameters=[1]),
        r"parameters\[0\] is 1, not a string",
    ),
    "parameters among settings": (setting("params", []), r"settings\.params is \[\], not a setting"),
    "a learning rate of text": (setting("lr", "x"), r"settings\.lr is 'x', not a number"),
    "a learning rate of NaN": (setting("lr", NAN), r"settings\.lr is nan, not a number"),
    "an infinite learning rate": (setting("lr", {"$": "float", "value": "inf"}), r"settings\.lr is inf, not a finite"),
    "one beta": (setting("betas", {"$": "tuple", "items": [0.9]}), r"settings\.betas is \(0\.9,\), not 2 numbers"),
    "amsgrad of text": (setting("amsgrad", "yes"), r"settings\.amsgrad is 'yes', not True or False"),
    "amsgrad without its state": (setting("amsgrad", True), "lacks 'max_exp_avg_sq'"),
    "progress without steps": (lambda v: values(v)["shared"].update(progress={}), r"progress lacks 'steps'"),
    "progress without host": (lambda v: values(v)["shared"]["progress"].pop("host"), r"progress lacks 'host'"),
    "progress without a scale": (lambda v: values(v)["shared"]["progress"].pop("loss_scale"), r"lacks 'loss_scale'"),
    "a negative number of steps": (
        lambda v: values(v)["shared"]["progress"].update(steps=-1),
        r"progress\.steps is -1, not a count",
    ),
    "a loss scale of 0": (
        lambda v: values(v)["shared"]["progress"].update(loss_scale={"scale": 0.0, "good_steps": 1}),
        r"loss_scale\.scale is 0\.0, not above 0",
    ),
    "no random state": (lambda v: values(v).update(random={}), "random of rank 0 is no state"),
    "a random state of a number": (lambda v: values(v)["random"].update(torch=5), "random of rank 0 is no state"),
    "a random state cut short": (lambda v: values(v)["random"].update(python=[3]), "random of rank 0 is no state"),
    "a seed of text": (lambda v: values(v)["random"].update(seed="x"), "'x' is no seed"),
    "no scalars": (lambda v: v["parts"][0].update(scalars={}), "scalars of 'first.weight' lacks 'step'"),
    "scalars of a list": (scalars([1]), r"scalars of 'first.weight' is \[1\], not a table"),
    "a step of NaN": (scalars({"step": NAN}), r"'first.weight'\.step is nan, not a number"),
    "a negative step": (scalars({"step": -1}), r"'first.weight'\.step is -1, not a count"),
    "a large tensor among scalars": (scalars({"$": "large", "name": "#0"}), "large tensor, '#0', where none can be"),
    "scalars of nobody": (lambda v: v["parts"][0]["scalars"].update(x={}), "scalars has 'x', which is no parameter"),
    "an unknown value": (lambda v: values(v).update(extra={"$": "x"}), "extra of rank 0 holds a 'x'"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_values_that_were_edited_are_refused_by_name(what: str, saved: Path) -> None:
    edit, match = FORGERIES[what]
    forge(saved, edit)
    refused(saved, rf"{INDEX}: .*{match}", *made(seed=1))


RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a moment of all": (lambda e: None if e["kind"] == "state exp_avg_sq" else e, "lacks 'exp_avg_sq'"),
    "a moment of one": (
        lambda e: None if (e["name"], e["kind"]) == ("last.bias", "state exp_avg") else e,
        "'last.bias' lacks 'exp_avg'",
    ),
    "whole numbers as a moment": (
        lambda e: {**e, "dtype": "I32"} if e["kind"] == "state exp_avg" else e,
        r"\(state exp_avg\) is of torch\.int32",
    ),
    "whole numbers as parameters": (
        lambda e: {**e, "dtype": "I32"} if e["kind"] == "value" else e,
        r"\(value\) is of torch\.int32",
    ),
}


@pytest.mark.parametrize("what", RANGES)
def test_ranges_that_were_edited_are_refused_by_name(what: str, saved: Path) -> None:
    edit, match = RANGES[what]
    forge_entries(saved, edit)
    refused(saved, rf"{INDEX}: .*{match}", *made(seed=1))


def test_an_older_one_is_taken_in_place_of_one_that_was_edited(tmp_path: Path) -> None:
    model, optimizer = made()
    for step in range(2):
        train(model, optimizer, 1)
        zeroshard.save(tmp_path / f"step-{step}", model, optimizer, extra=step)
    forge(tmp_path / "step-0", lambda v: None)  # both of one age and number of steps: then names decide
    forge(tmp_path / "step-1", lambda v: values(v)["shared"].pop("progress") and None)
    assert zeroshard.load(tmp_path, model, optimizer, allow_older=True) == 0


def test_a_bad_random_state_can_be_left_out(saved: Path) -> None:
    forge(saved, lambda v: values(v).update(random={}))
    model, optimizer = made(seed=1)
    zeroshard.load(saved, model, optimizer, random=False)


def test_damage_to_a_large_value_is_told_as_damage(saved: Path) -> None:
    part = index_of(saved)["parts"][0]
    entry = next(entry for entry in part["entries"] if entry["kind"] == "tensor of rank 0")
    with open(saved / data_file(0), "r+b") as file:
        file.seek(part["header"] + entry["offset"])
        file.write(b"\xff\xff\xff")
    model, optimizer = made(seed=1)
    with pytest.raises(CheckpointError, match=rf"^{saved / data_file(0)} is damaged.*nothing was loaded"):
        zeroshard.load(saved, model, optimizer)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_an_optimizer_keeps_is_known_for_every_one_of_torch(kind: Any, tmp_path: Path) -> None:
    """Nothing that is saved is refused, and every state that is named is one that the optimizer cannot do without."""
    options = {"momentum": 0.9, "centered": True} if kind is torch.optim.RMSprop else {}
    options = {"momentum": 0.9} if kind is torch.optim.SGD else options
    options = {"amsgrad": True} if kind in (torch.optim.Adam, torch.optim.AdamW) else options
    model, optimizer = made(kind, **options)
    train(model, optimizer)
    zeroshard.save(tmp_path / "saved", model, optimizer)
    zeroshard.load(tmp_path / "saved", *made(kind, seed=1, **options))
    state = optimizer.state_dict()["state"].get(0, {})
    assert set(SUPPORTED[kind].under(options)) == set(state)


def test_a_state_that_the_host_has_not_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model, optimizer = made(amsgrad=True)
    train(model, optimizer)
    zeroshard.save(tmp_path / "saved", model, optimizer)
    host = made(seed=1, shard={"stage": 2, "offload": "cpu"})
    refused(tmp_path / "saved", "has 'max_exp_avg_sq' of .*, which the host's optimizer has not", *host)


ABOUT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a configuration of a number": (lambda about: about.update(config=5), "about.config is 5, not a table"),
    "no class": (lambda about: about.pop("class") and None, "about lacks 'class'"),
    "adapters of a number": (lambda about: about.update(adapters=5), "about.adapters is 5, not a table"),
    "names of a number": (lambda about: about.update(rounded_on_host=5), "about.rounded_on_host is 5, not a list"),
    "a tensor": (lambda about: about.update(config={"$": "large", "name": "#0"}), "large tensor, '#0'"),
    "bytes": (lambda about: about.update(config={"x": {"$": "bytes", "value": ""}}), "about is no JSON"),
    "an adapter without rank": (
        lambda about: about.update(adapters={"default": {"peft_type": "LORA", "lora_alpha": 1}}),
        "adapter 'default' has r = None",
    ),
}


@pytest.mark.parametrize("what", ABOUT)
def test_an_export_of_a_description_that_was_edited_is_one_line(
    what: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, match = ABOUT[what]
    forge(saved, lambda v: edit(values(v)["about"]))
    assert main(["export", str(saved), str(tmp_path / "out"), *(["--merge"] if "adapter" in what else [])]) == 2
    told = capsys.readouterr().err
    assert match in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()
