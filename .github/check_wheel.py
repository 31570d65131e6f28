"""Tries an installed wheel: its files are there, its native library loads, and a step with offload trains.

    python .github/check_wheel.py     # from any folder but the root of the repository, whose sources would come first

Ends with an error if anything is missing. The release workflow runs it with every version of Python.
"""

import math
import sys
from pathlib import Path

import torch

import zeroshard
from zeroshard.config.job import presets
from zeroshard.offload.library import Simd, choose
from zeroshard.offload.native.build import HERE, library_name

package = Path(zeroshard.__file__).parent
if "site-packages" not in package.parts:
    sys.exit(f"this tried {package}, which no wheel has installed: start it in another folder")
if not (HERE / library_name()).exists():
    sys.exit(f"{HERE} has no {library_name()}: the wheel was built without a compiler, or from other sources")
choice = choose()
if choice.simd is Simd.TORCH:
    sys.exit(f"the native library is not used: {choice.reason}")
for folder in ("plan/machine/machines", "plan/papers"):
    if not [*(package / folder).glob("*.toml")]:
        sys.exit(f"{folder} of the wheel is empty")
if "zero-7.5b" not in presets():
    sys.exit("the wheel has no presets")

model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = zeroshard.shard(
    model, optimizer, stage=2, offload=zeroshard.Offload(moments="8bit", split_master=True), precision="bf16"
)
losses = []
for _ in range(5):
    loss = model(torch.ones(4, 16, dtype=torch.bfloat16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):
    sys.exit(f"training does not work: the losses are {losses}")
print(
    f"zeroshard {zeroshard.__version__} on Python {sys.version.split()[0]}: {choice.simd.value} kernel, losses {losses}"
)
