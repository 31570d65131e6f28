"""Trains all 8 billion parameters of a model of Llama 3.1's shape on one person's machine: 24 GiB of GPU, 64 of host.

python examples/one_gpu/personal_8b.py --tokens 2048
python examples/one_gpu/personal_8b.py --tokens 16384

`offload="auto"` finds what fits, and prints its choice with the reasons. Given are only bf16, recomputed blocks, and
what auto may change. Of a larger GPU the process takes `--gpu-gib`, of a larger host `--host-gib` for states, and
`--threads`. The model is built on the meta device by `transformers` and gets its first values unit by unit. The text is
the source of Python's standard library, a byte a token, and no two steps see the same bytes.

`--layers 2 --hidden 64 --vocabulary 512 --tokens 256 --sequence 64 --steps 3` tries it on a small machine.
"""

import argparse
import resource
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import zeroshard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--hidden", type=int, default=4096)
parser.add_argument("--vocabulary", type=int, default=128256)
parser.add_argument("--tokens", type=int, default=16384, help="tokens a step")
parser.add_argument("--sequence", type=int, default=2048)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--gpu-gib", type=float, default=24, help="the most that this process may take of the GPU")
parser.add_argument("--host-gib", type=float, default=64, help="the most host memory for states")
parser.add_argument("--threads", type=int, default=8, help="threads of torch, and of the updates on the host")
parser.add_argument("--allow", nargs="*", default=["moments", "update_in_backward", "delayed_update_after"])
args = parser.parse_args()
if args.tokens % args.sequence:
    raise SystemExit(f"--tokens {args.tokens}: must be a multiple of --sequence {args.sequence}")

GIB = 1 << 30
CHUNK = 1024  # tokens whose logits exist at once: 128,256 numbers each
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
torch.set_num_threads(args.threads)
cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
if cuda:
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_gib * GIB / torch.cuda.mem_get_info()[1]))
heads = args.hidden // (128 if args.hidden % 512 == 0 else 16)
shape = LlamaConfig(
    num_hidden_layers=args.layers,
    hidden_size=args.hidden,
    intermediate_size=7 * args.hidden // 2,
    num_attention_heads=heads,
    num_key_value_heads=heads // 4,
    vocab_size=args.vocabulary,
    tie_word_embeddings=False,
)
with torch.device("meta"):
    model = WithLoss(AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16))
    example = torch.empty(args.tokens // args.sequence, args.sequence, dtype=torch.long)
parameters = sum(parameter.numel() for parameter in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
begin = time.perf_counter()
model, optimizer = zeroshard.shard(
    model,
    optimizer,
    stage="auto",
    offload=zeroshard.Offload.auto(args.allow, threads=args.threads, host_memory=int(args.host_gib * GIB)),
    precision="bf16",
    activations=zeroshard.Activations(),
    example=(example, example),
)
at_start = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
seconds = time.perf_counter() - begin
print(f"{parameters / 1e9:.2f}B parameters, ready in {seconds:.0f} s; peak until here: {at_start:.1f} GiB on the GPU")

source, times, losses = text(), [], []
if args.steps * args.tokens >= source.numel():
    raise SystemExit(f"--steps {args.steps}: the text is enough for {(source.numel() - 1) // args.tokens}")
for step in range(args.steps):
    begin = time.perf_counter()
    part = source[step * args.tokens : (step + 1) * args.tokens + 1].to(device).long()
    loss = model(part[:-1].view_as(example), part[1:].view_as(example))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())  # waits for the GPU; the host's updates go on
    times.append(time.perf_counter() - begin)
    print(f"step {step + 1}: loss {losses[-1]:.3f}, {times[-1]:.2f} s", flush=True)
zeroshard.synchronize(model)

settled = times[SETTLED:] or times
print(f"{args.tokens * len(settled) / sum(settled):,.0f} tokens/s, loss {losses[0]:.3f} to {losses[-1]:.3f}")
peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
reserved = torch.cuda.max_memory_reserved() / GIB if cuda else 0.0
host, states = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, zeroshard.stats(model).host_memory
print(f"peak: {peak:.1f} GiB on the GPU ({reserved:.1f} reserved), {host:.1f} GiB on the host", end="")
print(f" ({states.total / GIB:.1f} of it states)" if states else "")
