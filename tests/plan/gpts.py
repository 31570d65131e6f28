"""GPTs for tests of the plan: built and traced ones, and those of the papers, which have no module."""

from __future__ import annotations

from zeroshard.config.job import ModelConfig
from zeroshard.plan.machine.profile import Machine
from zeroshard.plan.model.gpt import from_config
from zeroshard.plan.model.model import Model
from zeroshard.plan.papers.shape import Transformer
from zeroshard.plan.setup import Setup
from zeroshard.plan.time.step_time import StepTime
from zeroshard.plan.time.step_time import step_time as time_of_work
from zeroshard.plan.time.work import Work


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 256, *, tied: bool = True) -> Model:
    """A GPT that is built and traced. It has as many positions as a sequence of the setup."""
    return from_config(
        ModelConfig(layers=layers, hidden=hidden, heads=heads, sequence=1024, vocabulary=vocabulary, tied=tied)
    )


def work_of(model: Model | Transformer, setup: Setup) -> Work:
    """The work of either kind."""
    work = model.work(setup) if isinstance(model, Transformer) else model.trace(setup).work
    assert work is not None
    return work


def step_time(model: Model | Transformer, setup: Setup, machine: Machine) -> StepTime:
    """The time of a step of either kind."""
    return time_of_work(work_of(model, setup), setup, machine)
