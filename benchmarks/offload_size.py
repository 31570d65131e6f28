"""How large a model one GPU and its host train, and how fast: real text, a capped device, offload.

    PYTHONPATH=. python benchmarks/offload_size.py --layers 65 --hidden 4096 --batch 4 --device-gib 32 --small

``--small`` takes 6 bytes of host memory a parameter (bf16 moments, split master read back from the device, updated in
backward), ``--small --clip`` 8, neither 14. The text is the Python standard library's source, byte by byte; every
micro-batch is another part of it. TFLOPS count recomputation as the papers do, as another whole forward:
96·B·s·L·h²·(1 + s/6h) for a GPT, 8·Ψ·tokens for a Llama.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.config.job import DataConfig, ModelConfig
from zeroshard.train.gpt import GPT
from zeroshard.train.gpt.corpus import Corpus

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Result:
    """What a run did."""

    parameters: int
    seconds: float
    tokens_a_second: float
    tflops: float
    first_losses: float
    last_losses: float
    device_peak_gib: float
    host_peak_gib: float
    setup_seconds: float


class Llama(nn.Module):
    """Hugging Face's Llama, called as our GPT is."""

    def __init__(self, layers: int, hidden: int, vocabulary: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.inner = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=layers,
                hidden_size=hidden,
                intermediate_size=43 * hidden // 16,
                num_attention_heads=max(1, hidden // 128),
                vocab_size=vocabulary,
                use_cache=False,
            )
        )
        self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.inner(tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(args: Any) -> nn.Module:
    """The model, on the device of the context."""
    if args.llama:
        return Llama(args.layers, args.hidden, 32000)
    heads = max(1, args.hidden // 128)
    return GPT(
        ModelConfig(layers=args.layers, hidden=args.hidden, heads=heads, sequence=args.sequence, checkpointing=True)
    )


class MixedPrecision:
    """Plain torch's way: fp32 masters beside a bf16 model, all on the device."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self._parameters = list(model.parameters())
        self._masters = [p.detach().float() for p in self._parameters]
        self._inner = torch.optim.AdamW(self._masters, lr=lr, betas=BETAS)
        self.param_groups = self._inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        self._inner.step()
        self._inner.zero_grad()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def plain(args: Any) -> tuple[nn.Module, MixedPrecision]:
    """Without zeroshard: the model is made on the device."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = build(args).bfloat16()
    return model, MixedPrecision(model, args.lr)


def sharded(args: Any) -> tuple[nn.Module, Any]:
    """With the optimizer on the host."""
    with torch.device("meta"):
        model = build(args)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=BETAS)
    return zeroshard.shard(
        model,
        optimizer,
        stage=2,
        precision="bf16",
        offload=offload(args),
        clip_grad_norm=1.0 if args.clip or not args.small else None,
    )


def offload(args: Any) -> zeroshard.Offload:
    """The options that the arguments ask for."""
    small = {"moments": torch.bfloat16, "split_master": True, "read_back": True} if args.small else {}
    return zeroshard.Offload(
        update_in_backward=args.small and not args.clip and args.micro == 1,
        host_fraction=args.host_fraction,
        threads=args.threads,
        host_memory=None if args.host_gib is None else int(args.host_gib * 2**30),
        **small,  # type: ignore[arg-type]
    )


def run(args: Any) -> Result:
    """Trains and measures."""
    cuda = torch.cuda.is_available()
    if cuda and args.device_gib is not None:
        torch.cuda.set_per_process_memory_fraction(args.device_gib * 2**30 / torch.cuda.mem_get_info()[1])
    begin = time.perf_counter()
    torch.manual_seed(0)
    model, optimizer = plain(args) if args.plain else sharded(args)
    parameters = sum(p.numel() for p in model.parameters())
    setup = time.perf_counter() - begin
    print(f"{parameters / 1e9:.2f}B parameters, set up in {setup:.0f} s", flush=True)
    device = torch.device("cuda" if cuda else "cpu")
    text = Corpus.read(DataConfig()).training
    losses: list[float] = []
    times: list[float] = []
    position = 0
    size = args.batch * args.sequence
    for number in range(args.steps):
        begin = time.perf_counter()
        total = 0.0
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (number + 1) / max(1, args.warmup))
        for _ in range(args.micro):
            part = text[position : position + size + 1].to(device).long()
            position = (position + size) % (text.numel() - size - 1)
            loss = model(part[:-1].view(args.batch, -1), part[1:].view(args.batch, -1))
            (loss / args.micro).backward()
            total += loss.detach() / args.micro
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))  # waits for the device, not for the host
        times.append(time.perf_counter() - begin)
        print(f"step {number}: loss {losses[-1]:.3f}, {times[-1]:.2f} s", flush=True)
    if not args.plain:
        zeroshard.synchronize(model)
    settled = times[2:] or times
    seconds = sum(settled) / len(settled)
    tokens = size * args.micro
    flops = 8 * parameters * tokens
    if not args.llama:
        flops = 96 * tokens * args.layers * args.hidden**2 * (1 + args.sequence / (6 * args.hidden))
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    first, last = (sum(part) / len(part) for part in (losses[:5], losses[-5:]))
    return Result(parameters, seconds, tokens / seconds, flops / seconds / 1e12, first, last, peak, host, setup)


def main() -> None:
    """Runs one model and prints what it did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=65)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=0, help="steps over which lr rises; deep models need it")
    parser.add_argument("--device-gib", type=float, help="cap of the device's memory")
    parser.add_argument("--host-gib", type=float, help="budget of host memory")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--host-fraction", type=float, default=1.0)
    parser.add_argument("--small", action="store_true", help="least host memory a parameter")
    parser.add_argument("--clip", action="store_true", help="clip with --small, which then does not update in backward")
    parser.add_argument("--llama", action="store_true", help="Hugging Face's Llama instead of our GPT")
    parser.add_argument(
        "--plain", action="store_true", help="plain torch instead, mixed precision by hand on the device"
    )
    parser.add_argument("--out")
    args = parser.parse_args()
    result = run(args)
    print(json.dumps(asdict(result)), flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"arguments": vars(args), **asdict(result)}, file, indent=1)


if __name__ == "__main__":
    main()
