"""A step of a real architecture through ``shard()`` alone: tokens a second, FLOPS and memory on one GPU.

    PYTHONPATH=. python benchmarks/huggingface_step.py qwen2.5-14b --batch 8 --offload 8bit
    PYTHONPATH=. python benchmarks/huggingface_step.py qwen2.5-14b --batch 32 --small-loss --host-fraction 0.8
    PYTHONPATH=. python benchmarks/huggingface_step.py llama-3.1-8b --batch 4 --offload none

The model is the one of ``transformers``, unchanged, built on the meta device. Its loss is its own, or with
``--small-loss`` the one of ``zeroshard finetune``, which takes less memory for logits. Every way of training runs in a
process of its own: with all blocks recomputed, with as many as must be, and each of them compiled block by block.
``--layers 2 --hidden 64 --vocabulary 512 --sequence 64`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zeroshard
from zeroshard.train.language.packing import IGNORED
from zeroshard.train.language.token_loss import summed_loss

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen2.5-14b": {
        "model_type": "qwen2",
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
}
OFFLOADS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "exact": {},
    "16bit": {"moments": torch.bfloat16, "split_master": True, "read_back": True, "update_in_backward": True},
    "8bit": {"moments": "8bit", "split_master": True, "read_back": True, "update_in_backward": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": 1.0},
    "recomputed, compiled": {"recompute": 1.0, "compile": True},
    "as needed": {"recompute": "auto"},
    "as needed, compiled": {"recompute": "auto", "compile": True},
}
SETTLED = 3
"""The first steps allocate, compile, and show what must be recomputed. Times are of those after them."""


@dataclass(frozen=True)
class Result:
    """What one way of training did."""

    way: str
    parameters: int
    seconds: float
    tokens_a_second: float
    model_tflops: float
    """Without what is recomputed."""
    device_gib: float
    host_gib: float
    ready: float
    """Seconds until the first step."""
    loss: float


def train(args: argparse.Namespace) -> Result:
    """Trains in the one way that ``args`` names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    cuda, way = torch.cuda.is_available(), WAYS[args.way]
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    shape = dict(SHAPES[args.shape])
    if args.layers:
        shape["num_hidden_layers"] = args.layers
    if args.hidden:
        shape |= {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if args.vocabulary:
        shape["vocab_size"] = args.vocabulary
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, tie_word_embeddings=False, use_cache=False)
    begin = time.perf_counter()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if args.small_loss:
        model.loss_function = small_loss
    if way.get("compile"):
        for layer in model.model.layers:
            layer.compile()
    offload = OFFLOADS[args.offload]
    model, optimizer = zeroshard.shard(
        model,
        optimizer,
        stage=2,
        precision="bf16",
        activations=zeroshard.Activations(recompute=way["recompute"]),
        offload=None if offload is None else zeroshard.Offload(**offload, host_fraction=args.host_fraction),
        defragment=cuda,
        clip_grad_norm=None if offload is not None and offload.get("update_in_backward") else 1.0,
    )
    ready = time.perf_counter() - begin
    tokens = torch.randint(0, config.vocab_size, (args.batch, args.sequence), device=device)

    def step() -> float:
        for number in range(1, args.micro_batches + 1):
            with nullcontext() if number == args.micro_batches else zeroshard.no_sync(model):
                loss: Tensor = model(input_ids=tokens, labels=tokens).loss / args.micro_batches
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() * args.micro_batches

    times, loss = [], 0.0
    for _ in range(SETTLED + args.steps):
        begin = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - begin)
    with zeroshard.trace(args.trace) if args.trace else nullcontext():
        for _ in range(2 if args.trace else 0):
            step()
    zeroshard.synchronize(model)
    seconds, size = sum(times[SETTLED:]) / args.steps, args.micro_batches * args.batch * args.sequence
    matrices = parameters - config.vocab_size * config.hidden_size  # the embedding is a look-up
    attention = 6 * config.num_hidden_layers * args.sequence * config.hidden_size  # causal
    return Result(
        way=args.way,
        parameters=parameters,
        seconds=seconds,
        tokens_a_second=size / seconds,
        model_tflops=size * (6 * matrices + attention) / seconds / 1e12,
        device_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        host_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        ready=ready,
        loss=loss,
    )


def small_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """The mean loss of the tokens that follow others."""
    wanted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return summed_loss(logits, wanted) / (wanted != IGNORED).sum()


def main() -> None:
    """Runs every way in a process of its own, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1, help="of --batch sequences each, added up")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--offload", choices=OFFLOADS, default="8bit")
    parser.add_argument("--host-fraction", type=float, default=1.0, help="of the optimizer states that are offloaded")
    parser.add_argument("--small-loss", action="store_true", help="the loss of zeroshard finetune")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, help="run this one here, and print its result as JSON")
    parser.add_argument("--trace", help="write a trace of two more steps to this file; of the last way, if several")
    parser.add_argument("--out", help="write all results to this file")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(asdict(train(args))))
        return
    results = []
    for way in args.ways:
        done = subprocess.run([sys.executable, *sys.argv, "--way", way], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(done.stdout + f"{way:22} failed with exit code {done.returncode}", flush=True)
            continue
        *said, last = done.stdout.splitlines()
        print(*said, sep="\n")
        results.append(Result(**json.loads(last)))
        found = results[-1]
        print(
            f"{found.way:22} {found.seconds:.3f} s  {found.tokens_a_second:,.0f} tokens/s  {found.model_tflops:.0f} "
            f"TFLOPS of the model  device {found.device_gib:.1f} GiB  host {found.host_gib:.1f} GiB  "
            f"ready in {found.ready:.0f} s  loss {found.loss:.4f}",
            flush=True,
        )
    if args.out:
        with open(args.out, "w") as file:
            json.dump([asdict(result) for result in results], file, indent=1)


if __name__ == "__main__":
    main()
