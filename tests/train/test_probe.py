"""The steps that are looked at closely, and what they show, in a world of one."""

import json
from pathlib import Path

import pytest
import torch

import zeroshard
from zeroshard import Offload
from zeroshard.config.job import ModelConfig, TrainConfig
from zeroshard.plan.papers.formulas import paper_memory, paper_traffic
from zeroshard.train.gpt import GPT
from zeroshard.train.probe import LEAST_STEPS_TO_TRACE, Probe, measured_step, traced_steps
from zeroshard.train.record import Record
from zeroshard.train.views import trace_line

STEPS = TrainConfig(steps=6, evaluate_every=100)


def run(stage: int, precision: str, offload: Offload | None, trace_file: Path | None = None) -> tuple[GPT, Record]:
    """Train a small GPT for a few steps with a probe."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=3, hidden=64, heads=2, sequence=32))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeroshard.shard(
        model, optimizer, stage=stage, precision=precision, offload=offload, device="cpu"
    )
    tokens = torch.arange(64).view(2, 32)
    record = Record(world=1, precision=precision, tokens_a_step=64)
    with Probe(model, STEPS, record, trace_file) as probe:
        for step in range(1, STEPS.steps + 1):
            probe.begin(step)
            model(tokens, tokens).backward()
            probe.before_update(step)
            optimizer.step()
            optimizer.zero_grad()
            probe.end(step)
    return model, record


BF16 = torch.bfloat16
READ_BACK = Offload(split_master=True, read_back=True)


@pytest.mark.parametrize(
    ("stage", "precision", "offload"),
    [
        *((stage, "bf16", Offload()) for stage in range(4)),
        (2, "fp32", Offload()),
        (2, "fp16", Offload()),
        (2, "bf16", Offload(blocking=True)),
        (2, "bf16", Offload(moments=BF16)),
        (2, "bf16", Offload(moments=BF16, split_master=True)),
        (2, "bf16", Offload(moments="8bit", split_master=True)),
        (2, "bf16", READ_BACK),
        (2, "bf16", Offload(update_in_backward=True)),
        (2, "bf16", Offload(update_in_backward=True, split_master=True, read_back=True)),
        (2, "bf16", Offload(delayed_update_after=2)),
        (2, "bf16", Offload(delayed_update_after=2, split_master=True)),
        (2, "fp32", Offload(delayed_update_after=2)),
        (2, "bf16", Offload(host_fraction=0.5)),
        (3, "bf16", Offload(parameters="cpu")),
        (3, "fp32", Offload(parameters="cpu")),
        (3, "bf16", Offload(parameters="cpu", delayed_update_after=2)),
        (3, "bf16", Offload(parameters="cpu", split_master=True, update_in_backward=True)),
    ],
    ids=str,
)
def test_what_is_measured_is_what_the_formulas_say(stage: int, precision: str, offload: Offload) -> None:
    model, record = run(stage, precision, offload)
    stats = zeroshard.stats(model)
    measured = record.offload
    assert measured is not None
    assert measured.traffic is not None
    paper = paper_memory(stage, 1, precision, measured.part)
    for rows, memory in ((paper.device, measured.device), (paper.host, measured.host)):
        for row in rows:
            assert getattr(memory, row.kind) == pytest.approx(row.bytes(stats.parameters), rel=0.01), row
    kept = stats.kept_parameters / stats.padded_parameters
    expected, _ = paper_traffic(precision, measured.part, kept)
    assert measured.traffic / stats.parameters == pytest.approx(expected, rel=0.01)


def test_looking_changes_nothing_about_a_delayed_update(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for _ in range(2):
        model, _ = run(2, "fp32", Offload(delayed_update_after=1))
        zeroshard.synchronize(model)
        weights.append(zeroshard.full_state_dict(model))
        for name in ("begin", "before_update", "end"):
            monkeypatch.setattr(Probe, name, lambda *_: None)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_without_offload_there_is_nothing_to_measure() -> None:
    for offload in (None, Offload(host_fraction=0)):
        _, record = run(2, "bf16", offload)
        assert record.offload is None
        assert record.trace is None


def test_a_trace_is_written_and_told(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    _, record = run(2, "bf16", Offload(), file)
    assert record.trace is not None
    assert trace_line(record.trace).startswith(
        f"traced steps 3 to 5 in {file}: copies hidden by neither device nor host work took "
    )
    events = json.loads(file.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    names = [tracks[event["tid"]] for event in events if event["ph"] == "X"]
    assert set(names) == {"compute", "host update", "to the host", "to the device"}
    units = len({event["name"] for event in events if event["ph"] == "X" and tracks[event["tid"]] == "to the host"})
    assert names.count("to the host") == names.count("to the device") == 3 * units


def test_a_trace_without_offload_says_that_nothing_was_copied(tmp_path: Path) -> None:
    _, record = run(2, "fp32", None, tmp_path / "steps.json")
    assert record.trace is not None
    assert trace_line(record.trace).endswith("nothing is offloaded, so nothing was copied")


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("evaluate_every", range(1, 12))
def test_no_evaluation_falls_between_steps_that_are_looked_at(steps: int, evaluate_every: int) -> None:
    train = TrainConfig(steps=steps, evaluate_every=evaluate_every)
    follows = {step for step in range(1, steps + 1) if (step - 1) % evaluate_every == 0}
    measured = measured_step(train)
    assert 1 <= measured <= steps
    assert measured not in follows or set(range(2, steps + 1)) <= follows
    if steps >= LEAST_STEPS_TO_TRACE:
        traced = traced_steps(train)
        assert 1 <= len(traced) <= 3
        assert traced[0] >= 2
        assert traced[-1] < measured
        assert not follows & set(traced[1:])
