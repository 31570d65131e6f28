"""What recording a run costs: steps with `zeroshard.record` beside steps without, in turns, in one process.

    PYTHONPATH=. python benchmarks/recording.py --rounds 6

Two models of the same kind train in turns, a block of steps each, so that both meet the same machine. The ratio of
every round is printed, and the median. Traced steps and steps at which memory is read are counted like all others.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import zeroshard
from zeroshard.config.job import ModelConfig
from zeroshard.train.gpt.model import GPT


def loop_of(shape: ModelConfig, batch: int, folder: str | None) -> Callable[[int], float]:
    """Return a function that makes some steps and returns the seconds of one."""
    torch.manual_seed(0)
    model = GPT(shape)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    tokens = torch.randint(0, 256, (batch, shape.sequence), device=next(model.parameters()).device)
    run = None if folder is None else zeroshard.record(model, folder, tokens=tokens.numel()).__enter__()

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

    return steps


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
        plain, recorded = loop_of(shape, 4, None), loop_of(shape, 4, folder)
        plain(8), recorded(8)  # set-up, and the first trace
        ratios = []
        for number in range(arguments.rounds):
            if number % 2:
                before, after = plain(arguments.steps), recorded(arguments.steps)
            else:
                after, before = recorded(arguments.steps), plain(arguments.steps)
            ratios.append(after / before)
            print(
                f"round {number + 1}: {1e3 * before:.3f} ms without, {1e3 * after:.3f} ms with, ratio {ratios[-1]:.4f}"
            )
        print(f"median ratio {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
