"""`zeroshard train` as a user runs it: real ranks, real files, from start to closing table."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.matrix import slow
from zeroshard.cli.main import main
from zeroshard.config.job import load_job
from zeroshard.train.gpt.weights import load_weights

COMMAND = [sys.executable, "-m", "zeroshard", "train", "tiny", "--device", "cpu"]
ENDLESS = ["--set", "train.steps=1000000", "--set", "train.evaluate_every=1000000", "--set", "train.report_every=5"]
TIMEOUT = 120


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # so that runs can be compared bit by bit, whatever the cores


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=ONE_THREAD)


def held_out_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"held-out loss ([\d.]+) (?:before|after)", output)]


def training_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+/\d+ · loss ([\d.]+)", output)]


class Runs:
    """A run of each stage on two ranks, made when it is first asked for: output and folder of weights."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._made: dict[int, tuple[str, Path]] = {}

    def __getitem__(self, stage: int) -> tuple[str, Path]:
        if stage not in self._made:
            out = self._folders.mktemp(f"stage{stage}")
            done = train("--stage", str(stage), "--ranks", "2", "--out", str(out))
            assert done.returncode == 0, done.stderr
            self._made[stage] = (done.stdout, out)
        return self._made[stage]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_a_run_learns_and_reports_progress(stage: int, runs: Runs) -> None:
    output, _ = runs[stage]
    losses = held_out_losses(output)
    assert len(losses) == 3  # before, in the middle, at the end
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] - 0.5
    assert re.search(
        r"step 8/12 · loss [\d.]+ · [\d,]+ tokens/s · parameters [\d.]+, gradients [\d.]+, "
        r"optimizer states [\d.]+ MB · volume [\d.]+ Ψ",
        output,
    )


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_the_closing_table_measures_what_the_paper_says(stage: int, runs: Runs) -> None:
    output, _ = runs[stage]
    cells = {row[0].strip(): row[1:] for row in (line.split("│")[1:-1] for line in output.splitlines()) if row}
    for kind in ("parameters, MB", "gradients, MB", "optimizer states, MB", "all model states, MB"):
        measured, paper = (float(cell) for cell in cells[kind][:2])
        assert measured == pytest.approx(paper, rel=0.01, abs=0.011), kind  # two decimals are shown
    measured, paper = (float(cell) for cell in cells["volume per step, Ψ"][:2])
    assert measured == paper
    assert paper == 2 if stage == 1 else 2 < paper < 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--stage=0"], ["--stage=1"], ["--stage=3", "--precision=bf16"], ["--offload=cpu"]]
)
def test_micro_batches_are_one_step_with_the_memory_and_volume_of_the_formulas(
    options: list[str], runs: Runs, tmp_path: Path
) -> None:
    done = train(*options, "--ranks=2", "--set=train.batch=2", "--set=train.micro_batches=2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "12 steps of 2 × 2 × 2 × 64 bytes" in done.stdout
    if "bf16" not in options[-1]:
        assert training_losses(done.stdout) == pytest.approx(training_losses(runs[3][0]), abs=2e-3)
    cells = {row[0].strip(): row[1:] for row in (line.split("│")[1:-1] for line in done.stdout.splitlines()) if row}
    places = ("device ", "host ") if "offload" in options[-1] else ("",)
    kinds = ("parameters, MB", "gradients, MB", "optimizer states, MB")
    for kind in (*(f"{place}{kind}" for place in places for kind in kinds), "volume per step, Ψ"):
        measured, paper = (float(cell) for cell in cells[kind][:2])
        assert measured == pytest.approx(paper, rel=0.01, abs=0.011), kind


@pytest.mark.slow
def test_a_run_with_micro_batches_goes_on_with_the_same_sequences_on_other_ranks(tmp_path: Path) -> None:
    several = ["--set=train.batch=2", "--set=train.micro_batches=2", "--save-every=6"]
    whole = train("--ranks=2", *several, "--out", str(tmp_path / "whole"))
    middle = tmp_path / "whole/checkpoints/step-00000006"
    rest = train("--ranks=1", *several, "--resume", str(middle), "--out", str(tmp_path / "rest"))
    assert rest.returncode == 0, rest.stderr
    assert "12 steps of 1 × 4 × 2 × 64 bytes" in rest.stdout
    assert training_losses(rest.stdout)[-2:] == pytest.approx(training_losses(whole.stdout)[-2:], abs=2e-3)


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_the_saved_weights_are_a_plain_model_that_was_trained(stage: int, runs: Runs) -> None:
    output, out = runs[stage]
    model = load_weights(out, torch.device("cpu"))
    assert model.config == load_job("tiny").model
    assert "a sample from the saved weights:\n    import " in output


OFFLOADED = {
    "stage 2": ["--offload", "cpu", "--stage", "2", "--trace", "trace.json"],
    "parameters on the host": [
        "--set",
        "shard.offload.parameters=cpu",
        "--set",
        "shard.offload.delayed_update_after=4",
    ],
}


@pytest.fixture(scope="module", params=OFFLOADED)
def offloaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """A run with offload on two ranks: which, its output and its folder."""
    folder = tmp_path_factory.mktemp("offloaded")
    arguments = [text.replace("trace.json", str(folder / "trace.json")) for text in OFFLOADED[request.param]]
    done = train(*arguments, "--precision", "bf16", "--ranks", "2", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return request.param, done.stdout, folder


@pytest.mark.slow
def test_with_offload_the_closing_table_measures_both_places_and_their_traffic(
    offloaded: tuple[str, str, Path],
) -> None:
    way, output, _ = offloaded
    cells = {row[0].strip(): row[1:] for row in (line.split("│")[1:-1] for line in output.splitlines()) if row}
    kinds = ("parameters, MB", "gradients, MB", "optimizer states, MB")
    rows = [f"{place} {kind}" for place in ("device", "host") for kind in kinds]
    for kind in (*rows, "all on the device, MB", "all on the host, MB"):
        measured, paper = (float(cell) for cell in cells[kind][:2])
        assert measured == pytest.approx(paper, rel=0.01, abs=0.011), kind  # two decimals are shown
    measured, paper = (float(cell) for cell in cells["traffic, bytes a parameter"][:2])
    assert measured == pytest.approx(paper, rel=0.01)
    formulas = [cells[row][2].strip() for row in rows]
    if way == "stage 2":
        assert formulas == ["2Ψ", "0", "0", "0", "2Ψ/2", "12Ψ/2"]
        assert paper == 4
    else:
        assert formulas == ["0", "0", "0", "4Ψ/2", "2Ψ/2", "12Ψ/2"]
        assert 4 < paper < 6


@pytest.mark.slow
def test_with_offload_a_run_learns_and_says_what_is_where(offloaded: tuple[str, str, Path]) -> None:
    _, output, folder = offloaded
    losses = held_out_losses(output)
    assert losses[2] < losses[0] - 0.5
    by_kind = r"parameters [\d.]+, gradients [\d.]+, optimizer states [\d.]+ MB"
    assert re.search(rf"step 8/12 · .* · device: {by_kind} · host: {by_kind} · volume [\d.]+ Ψ", output)
    assert "bf16, offload cpu, 2 CPU rank(s)" in output
    assert (folder / "model.safetensors").exists()


@pytest.mark.slow
def test_a_trace_is_written_and_the_share_of_exposed_copies_told(offloaded: tuple[str, str, Path]) -> None:
    way, output, folder = offloaded
    told = re.search(r"traced steps 9 to 11 in (\S+): copies hidden by neither .* took ([\d.]+)% of the time", output)
    assert (told is not None) == (folder / "trace.json").exists() == (way == "stage 2")
    if told is not None:
        assert Path(told[1]) == folder / "trace.json"
        assert 0 <= float(told[2]) <= 100
        assert {event["ph"] for event in json.loads(Path(told[1]).read_text())["traceEvents"]} == {"M", "X"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "shard.offload.momets=bf16"], "shard.offload: offload.momets is unknown (did you mean 'moments'?)"),
        (["--offload", "gpu"], "argument --offload: invalid choice: 'gpu'"),
        (["--offload", "cpu", "--trace", "nowhere/trace.json"], "--trace nowhere/trace.json: its folder does not"),
        (["--trace", "."], "--trace .: is a folder"),
        (["--set", "shard.defragment=true"], "no effect on a CPU; add --set shard.defragment=false"),
        (["--trace", "trace.json", "--steps", "3"], "--trace: of 3 step(s) none has settled; use at least 4"),
    ],
)
def test_bad_input_is_told_before_anything_starts(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["train", "tiny", "--device", "cpu", *arguments])
    except SystemExit as stopped:  # argparse's own
        code = int(str(stopped.code))
    assert code == 2
    assert told in capsys.readouterr().err


def test_the_list_of_presets_says_which_are_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["offload-13b"].endswith("65 layers of 4096, stage 2, offload cpu")
    assert lines["zero-1.5b"].endswith("48 layers of 1600, stage 2")


@pytest.mark.slow
def test_stages_train_the_same_model(runs: Runs) -> None:
    assert held_out_losses(runs[3][0]) == held_out_losses(runs[1][0])
    three, one = (load_file(runs[stage][1] / "model.safetensors") for stage in (3, 1))
    assert three.keys() == one.keys()
    for name in three:
        assert torch.equal(three[name], one[name]), name


@pytest.mark.slow
def test_two_nodes_run_the_same_command_and_train_the_same_model(tmp_path: Path, runs: Runs) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*COMMAND, "--ranks", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    nodes = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), "--local-addr", f"127.0.0.{node + 1}", "--out", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ONE_THREAD,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=TIMEOUT) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert held_out_losses(outputs[0][0]) == held_out_losses(runs[3][0])
    assert outputs[1][0] == ""  # only rank 0 speaks
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path, runs[3][1]))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.slow
def test_it_is_a_rank_under_a_torchrun_of_ones_own(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*torchrun, *COMMAND[1:], "--steps", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.safetensors").exists()
    assert "1 CPU rank(s)" in done.stdout


@pytest.mark.slow
def test_a_rank_that_raises_is_told_once_in_plain_words(tmp_path: Path) -> None:
    done = train("--ranks", "1", "--set", f"data.folder={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].startswith("zeroshard train: rank 0 failed: ValueError: data.folder: no file")
    assert "ChildFailedError" not in done.stderr


@pytest.mark.slow
def test_with_json_standard_output_has_lines_of_json_alone_and_one_rank_logs(tmp_path: Path) -> None:
    done = train("--ranks", "2", "--json", "--log", "tensorboard", "--offload", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["event"] for event in events if event["event"] != "evaluation"] == ["start", *["step"] * 4, "end"]
    assert events[0]["ranks"] == 2
    assert steps[-1]["host_memory"]["optimizer_states"] > 0
    assert steps[-1]["exposed_waits"]["collectives"] > 0
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert training_losses(done.stderr) == pytest.approx([step["loss"] for step in steps], abs=1e-3)
    assert "a sample from the saved weights" in done.stderr


def start_endless(
    tmp_path: Path, *arguments: str, preexec: Callable[[], object] | None = None
) -> subprocess.Popen[str]:
    """Start a run that never ends by itself and return it once it trains."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*COMMAND, "--ranks", "2", "--out", str(tmp_path), *ENDLESS, *arguments],
        preexec_fn=preexec,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    seen = []
    deadline = time.monotonic() + TIMEOUT
    while not any(line.startswith("step 5/") for line in seen):
        assert select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))[0], seen
        line = process.stdout.readline()
        assert line, (seen, process.communicate()[1])
        seen.append(line)
    return process


def rank_processes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    ranks = [child for child in psutil.Process(process.pid).children() if "RANK" in child.environ()]
    return sorted(ranks, key=lambda child: child.environ()["RANK"])


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_every_rank(tmp_path: Path) -> None:
    process = start_endless(tmp_path)
    ranks = rank_processes(process)
    assert len(ranks) == 2
    process.send_signal(signal.SIGINT)
    said, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert told.splitlines() == ["zeroshard train: Ctrl-C: the run saves and ends; Ctrl-C once more ends it at once"]
    stopped = re.search(r"stopped after step \d+ \(SIGINT\); saved (\S+)", said)
    assert stopped is not None, said
    assert (Path(stopped[1]) / "COMPLETE").exists()
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
def test_ctrl_c_saves_although_it_also_ends_the_reader_of_the_output(tmp_path: Path) -> None:
    """As in `zeroshard train 2>&1 | tee log`."""
    process = start_endless(tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    process.wait(60)
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert (saved / "COMPLETE").exists()


@pytest.mark.slow
def test_ctrl_c_in_the_last_step_loses_nothing(tmp_path: Path) -> None:
    steps = ["--steps", "6", "--set", "train.report_every=1", "--set", "train.evaluate_every=1000"]
    command = [*COMMAND, "--ranks", "2", "--out", str(tmp_path), *steps]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 6/6") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "before they could save" not in told
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_ranks_that_cannot_save(tmp_path: Path) -> None:
    process = start_endless(tmp_path)
    ranks = rank_processes(process)
    ranks[1].suspend()  # the other rank waits for it in a collective
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 130
    assert "interrupted; all ranks of this node were stopped before they could save" in told
    assert "--resume auto goes on from the newest checkpoint" in told
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    process = start_endless(tmp_path)
    rank_processes(process)[1].kill()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "zeroshard train: rank 1 failed: killed from outside (SIGKILL)" in told


@pytest.mark.slow
def test_tensor_parallel_ranks_train_one_model_and_learn_the_same(tmp_path: Path) -> None:
    losses = []
    for ranks, degree in ((1, 1), (2, 2)):
        done = train(
            "--ranks",
            str(ranks),
            "--tensor-parallel",
            str(degree),
            "--steps",
            "6",
            "--out",
            str(tmp_path / str(degree)),
        )
        assert done.returncode == 0, done.stderr
        losses.append(held_out_losses(done.stdout))
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert "1 × 2 ranks" in done.stdout
    alone, divided = (load_file(tmp_path / degree / "model.safetensors") for degree in ("1", "2"))
    assert {name: value.shape for name, value in alone.items()} == {n: value.shape for n, value in divided.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3", "--tensor-parallel", "2"], "--tensor-parallel 2 does not divide the 3 rank(s)"),
        (["--ranks", "3", "--tensor-parallel", "3"], "train.tensor_parallel: must divide model.heads = 2, is 3"),
        (["--tensor-parallel", "0"], "train.tensor_parallel: must be at least 1, is 0"),
    ],
)
def test_a_degree_that_divides_nothing_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
