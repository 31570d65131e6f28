"""Configurations: every error at once, and the presets."""

import re
from pathlib import Path

import pytest

from zeroshard.train.job import DEFAULT_PRESET, JobError, TrainConfig, load_job, parse_override, presets


def write(folder: Path, text: str) -> str:
    file = folder / "job.toml"
    file.write_text(text)
    return str(file)


def problems(folder: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        load_job(write(folder, text))
    return caught.value.problems


def test_every_error_is_reported_at_once_with_key_path_and_nearest_key(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        """
        [model]
        layers = "six"
        hiden = 64
        heads = 5

        [train]
        lr = -1
        steps = 2.5
        device = "tpu"

        [shard]
        stge = 2
        precision = "fp8"

        [optimizer]
        name = "sgd"
        """,
    )
    expected = [
        "optimizer: unknown key",
        "model.layers: must be a whole number",
        "model.hiden: unknown key (did you mean 'hidden'?)",
        "model.heads: must divide hidden",
        "train.lr: must be above 0",
        "train.steps: must be a whole number, is 2.5",
        "train.device: must be one of auto, cpu, cuda",
        "shard.stge: unknown key (did you mean 'stage'?)",
        "shard.precision: ",
    ]
    for start in expected:
        assert sum(problem.startswith(start) for problem in found) == 1, (start, found)
    assert len(found) == len(expected)


def test_a_default_is_not_blamed_for_a_rejected_value(tmp_path: Path) -> None:
    assert problems(tmp_path, "[model]\nhidden = 'wide'\nheads = 4\n") == (
        "model.hidden: must be a whole number, is 'wide'",
    )


def test_a_missing_table_has_the_defaults(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, "[train]\nlr = 1\n"))
    assert job.name == "job"
    assert job.train == TrainConfig(lr=1.0)
    assert isinstance(job.train.lr, float)
    assert dict(job.shard) == {}


def test_a_table_that_is_none_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path, "model = 3\n") == ("model: must be a table, is 3",)


def test_a_device_for_all_ranks_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "[shard]\ndevice = 'cpu'\n")
    assert found.startswith("shard.device: ")
    assert "train.device" in found


def test_true_is_not_a_number(tmp_path: Path) -> None:
    assert problems(tmp_path, "[train]\nsteps = true\n") == ("train.steps: must be a whole number, is True",)


def test_text_that_is_not_toml_says_where(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "[model\n")
    assert found.startswith("not TOML: ")
    assert "line 1" in found


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(JobError, match=r"no such preset \(did you mean 'stdlib-10m'\?\)"):
        load_job("stdlib-10")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(JobError, match=r"no such file: nowhere/job\.toml"):
        load_job("nowhere/job.toml")


def test_overrides_replace_what_the_file_says() -> None:
    job = load_job(
        "tiny", dict(map(parse_override, ["train.lr=2e-3", "shard.precision=bf16", 'data.suffixes=[".rst"]']))
    )
    assert job.train.lr == 2e-3
    assert job.shard["precision"] == "bf16"
    assert job.data.suffixes == (".rst",)


def test_a_wrong_override_is_an_error_like_any_other() -> None:
    with pytest.raises(JobError, match=r"lr: an override names a table and a key") as caught:
        load_job("tiny", {"lr": 1e-3, "train.batc": 2, "trian.lr": 1})
    assert len(caught.value.problems) == 3
    with pytest.raises(ValueError, match="is not of the form"):
        parse_override("train.lr")


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid(name: str) -> None:
    assert load_job(name).name == name


PAPER_PRESETS = [name for name in presets() if name.startswith(("zero-", "offload-"))]


def test_the_papers_models_are_all_there() -> None:
    assert len([name for name in PAPER_PRESETS if name.startswith("zero-")]) == 9
    assert len([name for name in PAPER_PRESETS if name.startswith("offload-")]) == 14


@pytest.mark.parametrize("name", PAPER_PRESETS)
def test_a_paper_preset_has_the_parameters_its_name_says(name: str) -> None:
    billions = float(re.fullmatch(r"(?:zero|offload)-([\d.]+)b", name).group(1))
    assert load_job(name).model.parameters == pytest.approx(billions * 1e9, rel=0.05)


def test_the_default_has_about_ten_million_parameters() -> None:
    assert load_job(DEFAULT_PRESET).model.parameters == pytest.approx(10e6, rel=0.1)


def test_the_presets_are_reachable_from_the_repository_root() -> None:
    root = Path(__file__).parents[2]
    assert {file.stem for file in (root / "configs").glob("*.toml")} == set(presets())
