"""What recording a run costs: steps with `zeroshard.record` beside steps without, in turns, in one process.

    PYTHONPATH=. python benchmarks/recording.py --rounds 6

Two models of the same kind train in turns, a block of steps each, so that both meet the same machine. The ratio of
every round is printed, and the median. On a busy machine that is noise, so the time inside the recorder is measured as
well. Traced steps and steps at which memory is read are counted like all others.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import zeroshard
from zeroshard.config.job import ModelConfig
from zeroshard.recorder.recorder import Recorder
from zeroshard.train.gpt.model import GPT


class TimedRecorder(Recorder):
    """A recorder that counts the seconds that it takes."""

    seconds = 0.0

    def _after_step(self, *given: object) -> None:
        began = time.perf_counter()
        super()._after_step(*given)
        self.seconds += time.perf_counter() - began

    def log(self, **values: Any) -> None:
        """Count the time of this, too."""
        began = time.perf_counter()
        super().log(**values)
        self.seconds += time.perf_counter() - began


def loop_of(shape: ModelConfig, batch: int, folder: str | None) -> tuple[Callable[[int], float], TimedRecorder | None]:
    """Return a function that makes some steps and returns the seconds of one, and what records them."""
    torch.manual_seed(0)
    model = GPT(shape)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    tokens = torch.randint(0, 256, (batch, shape.sequence), device=next(model.parameters()).device)
    run = None if folder is None else TimedRecorder(model, folder, tokens=tokens.numel()).__enter__()

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if run is not None:
                run.log(loss=loss)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    return steps, run


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="steps of each side in a round")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    arguments = parser.parse_args()
    shape = ModelConfig(layers=arguments.layers, hidden=arguments.hidden, heads=4, sequence=64)
    with tempfile.TemporaryDirectory() as folder:
        (plain, _), (recorded, run) = loop_of(shape, 4, None), loop_of(shape, 4, folder)
        assert run is not None, "it has a folder"
        plain(8), recorded(8)  # set-up, and the first trace
        run.seconds, taken, ratios = 0.0, 0.0, list[float]()
        for number in range(arguments.rounds):
            if number % 2:
                before, after = plain(arguments.steps), recorded(arguments.steps)
            else:
                after, before = recorded(arguments.steps), plain(arguments.steps)
            ratios.append(after / before)
            taken += after * arguments.steps
            print(
                f"round {number + 1}: {1e3 * before:.3f} ms without, {1e3 * after:.3f} ms with, ratio {ratios[-1]:.4f}"
            )
        inside = run.seconds / (arguments.rounds * arguments.steps)
        print(f"median ratio {statistics.median(ratios):.4f}")
        print(f"inside the recorder: {1e6 * inside:.1f} µs a step, {run.seconds / taken:.3%} of the time")


if __name__ == "__main__":
    main()
