"""Trains all 32.8 billion parameters of a model of Qwen2.5-32B's shape on one GPU of 141 GB, with 125 GiB on the host.

python examples/one_gpu/train_32b.py

The model is built on the meta device by `transformers` and gets its first values on the GPU, unit by unit. The text is
the source of Python's standard library, a byte a token, and no two steps see the same bytes. What makes it fit, in
bytes a parameter: 2 on the GPU, for the bf16 parameters, and 4 on the host: the lower half of the fp32 master (2) and
two moments in 8 bits (2). The upper half of the master is read back from the GPU. A gradient is used as it arrives, so
none is stored, and gradients cannot be clipped. States for which the GPU has room stay there.

The first steps of Adam would overshoot at the full learning rate, so it rises over `--warm-up` steps.

`--layers 4 --hidden 256 --vocabulary 512 --sequence 128 --device-gib 0.04` tries it on a small machine.
"""

import argparse
import resource
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

import zeroshard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layers", type=int, default=64)
parser.add_argument("--hidden", type=int, default=5120)
parser.add_argument("--vocabulary", type=int, default=152064)
parser.add_argument("--sequence", type=int, default=4096)
parser.add_argument("--batch", type=int, default=4, help="sequences a step")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--lr", type=float, default=1e-5, help="the highest, after the warm-up")
parser.add_argument("--warm-up", type=int, default=10, help="steps in which lr rises to --lr")
parser.add_argument("--device-gib", type=float, default=118, help="of the GPU, for parameters and optimizer states")
args = parser.parse_args()

CHUNK = 2048  # tokens whose logits exist at once: 152,064 numbers each
SETTLED = 3  # the first steps also allocate; times are of those after them


class WithLoss(nn.Module):
    """A causal language model and its loss. The logits are made chunk by chunk, and made again in backward."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model.get_decoder()(tokens, use_cache=False).last_hidden_state
        chunks = zip(hidden.flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True)
        return torch.stack([zeroshard.checkpoint(self.loss_of, *chunk) for chunk in chunks]).sum() / targets.numel()

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model.lm_head(hidden).float(), targets, reduction="sum")


def text() -> Tensor:
    """Bytes of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


torch.manual_seed(0)
cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
head = 128 if args.hidden % 640 == 0 else 32
shape = Qwen2Config(
    num_hidden_layers=args.layers,
    hidden_size=args.hidden,
    intermediate_size=27 * args.hidden // 5,
    num_attention_heads=args.hidden // head,
    num_key_value_heads=args.hidden // head // 5 if args.hidden % 640 == 0 else args.hidden // head,
    vocab_size=args.vocabulary,
    tie_word_embeddings=False,
)
with torch.device("meta"):
    model = WithLoss(AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16))
parameters = sum(parameter.numel() for parameter in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
begin = time.perf_counter()
model, optimizer = zeroshard.shard(
    model,
    optimizer,
    stage=2,
    precision="bf16",
    activations=zeroshard.Activations(),
    offload=zeroshard.Offload(
        moments="8bit",
        split_master=True,
        read_back=True,
        update_in_backward=True,
        host_fraction="auto",
        device_memory=int(args.device_gib * 2**30),
    ),
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / args.warm_up))
print(f"{parameters / 1e9:.2f}B parameters, ready in {time.perf_counter() - begin:.0f} s", flush=True)

source, size, times, losses = text(), args.batch * args.sequence, [], []
if args.steps * size >= source.numel():
    raise SystemExit(f"--steps {args.steps}: the text has only enough bytes for {(source.numel() - 1) // size}")
matrices = parameters - args.vocabulary * args.hidden  # the embedding is a look-up
attention = 6 * args.layers * args.sequence * args.hidden  # of a token, causal, forward and backward
flops = size * (6 * matrices + attention)
# Neither the head nor a block's last product, whose result nothing needs in backward, is computed again.
once = args.vocabulary * args.hidden + args.layers * args.hidden * shape.intermediate_size
again = size * (2 * (matrices - once) + attention / 3)
for step in range(args.steps):
    begin = time.perf_counter()
    part = source[step * size : (step + 1) * size + 1].to(device).long()
    loss = model(part[:-1].view(args.batch, -1), part[1:].view(args.batch, -1))
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())  # waits for the GPU; the host's updates go on
    times.append(time.perf_counter() - begin)
    print(f"step {step + 1}: loss {losses[-1]:.3f}, {times[-1]:.2f} s", flush=True)
zeroshard.synchronize(model)
on_device = zeroshard.stats(model).memory.optimizer_states / (12 * parameters)  # 12 bytes a parameter there

settled = times[SETTLED:] or times
seconds = sum(settled) / len(settled)
rates = f"{flops / seconds / 1e12:.0f} TFLOPS of the model, {(flops + again) / seconds / 1e12:.0f} with recomputation"
print(f"{size / seconds:,.0f} tokens/s, {rates}")
host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
print(f"peak: {peak:.1f} GiB on the GPU, where {on_device:.1%} of the states stay, and {host:.1f} GiB on the host")
