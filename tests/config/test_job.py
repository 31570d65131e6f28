"""Configurations: every error at once, and the presets."""

import re
from pathlib import Path

import pytest
import torch

from zeroshard import Config, Offload
from zeroshard.config.job import DEFAULT_PRESET, JobError, TrainConfig, load_job, parse_override, presets


def write(folder: Path, text: str) -> str:
    file = folder / "job.toml"
    file.write_text(text)
    return str(file)


def problems(folder: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        load_job(write(folder, text))
    return caught.value.problems


def test_micro_batches_and_an_update_in_the_first_backward_exclude_each_other(tmp_path: Path) -> None:
    text = "[train]\nmicro_batches = 2\n[shard]\noffload = { update_in_backward = true }"
    (found,) = problems(tmp_path, text)
    assert found.startswith("train.micro_batches: 2 backward passes a step exclude shard.offload.update_in_backward")


LANGUAGE_MODEL = """
[model]
huggingface = "somebody/model"
{model}
[data]
files = ["a.jsonl"]
{data}
[train]
{train}
"""


def test_a_hugging_face_model_has_tables_of_its_own(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, LANGUAGE_MODEL.format(model="", data="", train="steps = 5")))
    assert (job.language_model.huggingface, job.files.files, job.train.steps) == ("somebody/model", ("a.jsonl",), 5)
    assert job.train.lr == 2e-5
    job = load_job(write(tmp_path, LANGUAGE_MODEL.format(model="lora = 16", data="", train="")))
    assert job.train.lr == 2e-4
    job = load_job(write(tmp_path, LANGUAGE_MODEL.format(model="lora = 16", data="", train="lr = 1")))
    assert job.train.lr == 1
    with pytest.raises(JobError, match="use `zeroshard plan somebody/model`"):
        _ = job.gpt


def test_mistakes_in_the_tables_of_a_hugging_face_model_are_told_at_once(tmp_path: Path) -> None:
    given = {
        "model": "lora_alpha = 8\nlayers = 2",
        "data": "sequence = 1\nfolder = 'x'",
        "train": "steps = 1\nepochs = 1",
    }
    found = problems(tmp_path, LANGUAGE_MODEL.format(**given))
    expected = [
        "model.layers: unknown key",
        "model.lora_alpha: has no effect without lora",
        "data.folder: unknown key",
        "data.sequence: must be at least 2, or 0, is 1",
        "train.steps: steps and epochs both say how long to train",
    ]
    for start in expected:
        assert sum(problem.startswith(start) for problem in found) == 1, (start, found)
    assert len(found) == len(expected)
    assert problems(tmp_path, "[model]\nhuggingface = 'a'") == ("data.files: name the files to train on",)


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


def test_a_key_that_is_gone_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "[shard]\narena = true\n")
    assert re.fullmatch(r"shard\.arena: arena is gone, because .*; use defragment=True", found)


def test_a_default_is_not_blamed_for_a_rejected_value(tmp_path: Path) -> None:
    assert problems(tmp_path, "[model]\nhidden = 'wide'\nheads = 4\n") == (
        "model.hidden: must be a whole number, is 'wide'",
    )


def test_the_default_of_a_rejected_number_of_heads_is_not_blamed(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "[model]\nheads = 'many'\n[train]\ntensor_parallel = 4\n")
    assert found == "model.heads: must be a whole number, is 'many'"


def test_a_missing_table_has_the_defaults(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, "[train]\nlr = 1\n"))
    assert job.name == "job"
    assert job.train == TrainConfig(lr=1.0)
    assert isinstance(job.train.lr, float)
    assert dict(job.shard) == {"precision": "bf16" if torch.cuda.is_available() else "fp32"}


def test_a_table_that_is_none_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path, "model = 3\n") == ("model: must be a table, is 3",)


def test_a_device_for_all_ranks_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "[shard]\ndevice = 'cpu'\n")
    assert found.startswith("shard.device: ")
    assert "train.device" in found


def test_recomputing_cannot_be_left_to_a_model_that_leaves_it_to_the_job() -> None:
    with pytest.raises(JobError, match=r"shard\.activations\.recompute: the model leaves recomputing to it"):
        load_job("tiny", {"shard.activations.recompute": 0, "shard.activations.offload": True})


def test_true_is_not_a_number(tmp_path: Path) -> None:
    assert problems(tmp_path, "[train]\nsteps = true\n") == ("train.steps: must be a whole number, is True",)


HUGE = "1" + "0" * 400

HOSTILE = {
    f"[train]\nlr = {HUGE}": "train.lr: must be a number that fits into 64 bits, is (an integer of 1329 bits)",
    f"[train]\nlr = -{HUGE}": "train.lr: must be a number that fits into 64 bits, is -(an integer of 1329 bits)",
    "[train]\nlr = 1e400": "train.lr: must be above 0, and finite, is inf",
    "[train]\nlr = nan": "train.lr: must be above 0, and finite, is nan",
    "[train]\nlr = true": "train.lr: must be a number, is True",
    "[train]\nweight_decay = inf": "train.weight_decay: must be below 2**63, is inf",
    "[train]\nweight_decay = nan": "train.weight_decay: must be at least 0, is nan",
    f"[train]\nsteps = {HUGE}": "train.steps: must be below 2**63, is (an integer of 1329 bits)",
    f"[train]\nsteps = 0x{'f' * 3900}": "train.steps: must be below 2**63, is (an integer of 15600",
    f"[train]\nseed = {1 << 64}": f"train.seed: must be a whole number, from 0 to below 2**64, is {1 << 64}",
    f"[model]\nhidden = {1 << 63}": f"model.hidden: must be below 2**63, is {1 << 63}",
    f"[model]\nvocabulary = {HUGE}": "model.vocabulary: must be below 2**63, is (an integer of 1329 bits)",
    f"[shard]\nprefetch = {HUGE}": "shard.prefetch: prefetch=(an integer of 1329 bits) must be below 2**63",
    f"[shard.offload]\nthreads = {HUGE}": "shard.offload: offload.threads=(an integer of 1329 bits) must be a whole",
    f"[shard]\nstage = {HUGE}": "shard.stage: stage=(an integer of 1329 bits) must be 0, 1, 2, 3",
    f"[data]\nfolder = '{'x' * 3000}'": "data.folder: must be an existing folder, is 'xxx",
    '[data]\nfolder = "a\\u0000b"': r"data.folder: must be an existing folder, is 'a\x00b'",
    f"[shard]\nkeep = ['{'x' * 3000}']\nstage = 1": "shard.keep: keep=('xxx",
    '[train]\ndevice = "\\u001b[2J"': r"train.device: must be one of auto, cpu, cuda, is '\x1b[2J'",
    '"\\u001b[2J" = 1': r"'\x1b[2J': unknown key",
    '[train]\n"\\u001b[2J" = 1': r"train.'\x1b[2J': unknown key",
    '[shard]\n"\\u001b[2J" = 1': r"shard.'\x1b[2J': unknown key",
    '[shard.offload]\n"\\u001b[2J" = 1': r"shard.offload: offload.'\x1b[2J' is unknown",
    'shard = "\\u001b[2J"': r"shard: must be a table, is '\x1b[2J'",
    f"a = {'[' * 3000}": "not TOML: it is nested too deep",
    f"[train]\nlr = {'1' * 5000}": "line 2 has more than 4,000 bytes",
    "#\n" * 60_000: "it has more than 100,000 bytes",
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:40]))
def test_a_value_that_nobody_means_is_refused_by_its_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        load_job(write(tmp_path, text))
    (problem,) = caught.value.problems
    assert problem.startswith(HOSTILE[text])
    assert problem.isprintable()
    assert len(problem) < 1000
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"[train]\nlr = '\xff'")
    with pytest.raises(JobError, match=r"job\.toml cannot be used:\n  not TOML: byte 14 is not UTF-8"):
        load_job(str(tmp_path / "job.toml"))


@pytest.mark.parametrize("value", ["[" * 3000, "1" * 5000])
def test_an_override_that_is_no_toml_is_refused_as_a_text(value: str) -> None:
    with pytest.raises(JobError, match=r"train\.lr: must be a number, is '"):
        load_job("tiny", dict([parse_override(f"train.lr={value}")]))


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


OFFLOAD_OPTIONS = [
    ("parameters", '"cpu"', "cpu"),
    ("update_in_backward", "true", True),
    ("delayed_update_after", "40", 40),
    ("host_fraction", "0.5", 0.5),
    ("host_fraction", '"auto"', "auto"),
    ("moments", '"bf16"', torch.bfloat16),
    ("split_master", "true", True),
    ("threads", "2", 2),
    ("host_memory", "1_000_000_000", 10**9),
    ("seed", "7", 7),
    ("blocking", "true", True),
]


@pytest.mark.parametrize(("option", "written", "value"), OFFLOAD_OPTIONS)
def test_every_option_of_an_offload_works_from_a_file_and_from_the_command_line(
    option: str, written: str, value: object, tmp_path: Path
) -> None:
    file = write(tmp_path, f"[shard]\nprecision = 'bf16'\n[shard.offload]\n{option} = {written}\n")
    plain = written.strip('"')
    overrides = dict(map(parse_override, ["shard.precision=bf16", f"shard.offload.{option}={plain}"]))
    without_clipping = {"shard.clip_grad_norm": None}
    jobs = [load_job(file), load_job("tiny", overrides | without_clipping)]
    jobs.append(load_job("offload-1b", overrides | without_clipping | {"shard.stage": 3}))
    for job in jobs:
        offload = Config.parse(job.shard).offload
        assert offload == Offload(**{option: value})


def test_options_of_an_offload_add_up_and_none_takes_them_away() -> None:
    def offload(*overrides: str) -> Offload | None:
        return Config.parse(load_job("offload-1b", dict(map(parse_override, overrides))).shard).offload

    assert offload() == Offload()
    assert offload("shard.offload.split_master=true", "shard.offload.read_back=true") == Offload(
        split_master=True, read_back=True
    )
    assert offload("shard.offload.host_fraction=auto", "shard.offload.device_memory=1000") == Offload(
        host_fraction="auto", device_memory=1000
    )
    assert offload("shard.offload.seed=3", "shard.offload.seed=none") == Offload()
    assert offload("shard.offload.seed=3", "shard.offload=cpu") == Offload()
    assert offload("shard.offload=none") is None


def test_what_auto_may_change_comes_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    file = write(tmp_path, "[shard.offload]\nallow = ['moments']\nhost_memory = 64_000_000_000\n")
    chosen = Offload.auto(allow=("moments",), host_memory=64_000_000_000)
    assert Config.parse(load_job(file).shard).choice == chosen
    for first in ("shard.offload=auto", "shard.offload.allow=[]"):
        written = (first, 'shard.offload.allow=["moments"]', "shard.offload.host_memory=64_000_000_000")
        job = load_job("tiny", dict(map(parse_override, written)))
        assert Config.parse(job.shard).choice == chosen
    assert Config.parse(load_job("tiny", {"shard.offload": "auto"}).shard).choice == Offload.auto()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ('shard.offload.allow=["moment"]', r"offload\.allow=\['moment'\] must name only moments, update_in_backward, "),
        ("shard.offload.momets=bf16", r"offload\.momets is unknown \(did you mean 'moments'\?\)"),
        ("shard.offload.moments=fp8", r"offload\.moments='fp8' is unknown"),
        ("shard.offload.moments=fp16", r"offload\.moments=torch\.float16 must be"),
        ("shard.offload.host_fraction=1.5", r"offload\.host_fraction=1\.5 must be a number from 0 to 1"),
        ("shard.offload.threads=two", r"offload\.threads='two' must be a whole number"),
        ("shard.offload.blocking=1", r"offload\.blocking=1 must be True or False"),
        ("shard.offload.read_back=true", r"offload\.read_back needs split_master"),
        ("shard.offload.device_memory=1000", r"offload\.device_memory has no effect"),
        ("shard.offload.parameters=cpu", r"offload\.parameters='cpu' has no effect in stage 2"),
        ("shard.offload.update_in_backward=true", r"offload\.update_in_backward .* excludes clip_grad_norm"),
        ("shard.offload=gpu", r"offload='gpu' must be \"cpu\""),
        ("shard.offload.threads.most=2", r"offload\.threads=\{'most': 2\} must be a whole number"),
        ("shard.stage.offload=cpu", r"shard\.stage\.offload: an override names a table and a key"),
    ],
)
def test_a_bad_option_of_an_offload_is_told_with_its_key(override: str, told: str) -> None:
    with pytest.raises(JobError, match=told) as caught:
        load_job("offload-1b", dict([parse_override(override)]))
    (problem,) = caught.value.problems
    assert problem.startswith("shard.")


def test_an_offload_is_checked_against_the_precision_that_the_device_implies() -> None:
    with pytest.raises(JobError, match=r"offload\.split_master needs precision='bf16', not torch\.float32"):
        load_job("tiny", {"train.device": "cpu", "shard.offload.split_master": True})
    assert load_job("tiny", {"train.device": "cuda", "shard.offload.split_master": True}).precision == "bf16"


@pytest.mark.parametrize("precision", ["fp32", "fp16", {"parameters": "fp16", "reduce": "fp32"}, {"reduce": "fp32"}])
def test_a_job_names_its_precision(precision: object) -> None:
    named = load_job("tiny", {"shard.precision": precision}).precision
    assert named == ("fp16" if "fp16" in str(precision) else "fp32")


def test_the_offload_papers_models_are_offloaded_and_no_others() -> None:
    assert {name for name in presets() if "offload" in load_job(name).shard} == {
        name for name in presets() if name.startswith("offload-")
    }


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid(name: str) -> None:
    assert load_job(name).name == name


PAPER_PRESETS = [name for name in presets() if name.startswith(("zero-", "offload-"))]


def test_the_papers_models_are_all_there() -> None:
    assert (
        len([name for name in PAPER_PRESETS if name.startswith("zero-")]) == 9 + 2 + 5
    )  # figure 1, a trillion, and C1 to C5
    assert len([name for name in PAPER_PRESETS if name.startswith("offload-")]) == 14


@pytest.mark.parametrize("name", PAPER_PRESETS)
def test_a_paper_preset_has_the_parameters_its_name_says(name: str) -> None:
    billions = float(re.fullmatch(r"(?:zero|offload)-([\d.]+)b(?:-c[1-5])?", name).group(1))
    assert load_job(name).model.parameters == pytest.approx(billions * 1e9, rel=0.05)


def test_the_default_has_about_ten_million_parameters() -> None:
    assert load_job(DEFAULT_PRESET).model.parameters == pytest.approx(10e6, rel=0.1)


def test_the_presets_are_reachable_from_the_repository_root() -> None:
    root = Path(__file__).parents[2]
    assert {file.stem for file in (root / "configs").glob("*.toml")} == set(presets())


def test_recomputation_is_chosen_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    def chosen(table: str, **overrides: object) -> object:
        file = tmp_path / "job.toml"
        file.write_text(table)
        job = load_job(str(file), {f"shard.activations.{name}": value for name, value in overrides.items()})
        assert not job.built_model.checkpointing, "shard() does it, so the model does not"
        activations = Config.parse(job.shard).activations
        return None if activations is None else activations.recompute

    table = "[model]\ncheckpointing = true\n[shard.activations]\n"
    assert chosen(f'{table}recompute = "auto"') == "auto"
    assert chosen(f"{table}recompute = 0.25") == 0.25
    assert chosen(f'{table}recompute = ["blocks.0"]') == ("blocks.0",)
    for written, value in (("0.5", 0.5), ("auto", "auto"), ("blocks.1*", ("blocks.1*",))):
        _, parsed = parse_override(f"shard.activations.recompute={written}")
        assert chosen("", recompute=parsed) == value
    with pytest.raises(JobError, match=r"activations\.checkpoint is gone: leave it out to recompute every block"):
        chosen("", checkpoint=True)
