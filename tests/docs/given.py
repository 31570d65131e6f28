"""The names that a part of a program on a page is given: ``<!-- given: model, optimizer, batches -->``."""

from __future__ import annotations

IMPORTS = "import os, torch, zeroshard\nfrom torch import nn\ntorch.manual_seed(0)\n"

GIVEN = {
    "GPT": (
        "class GPT(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))\n"
        "        self.head = nn.Linear(16, 1)\n"
        "    def forward(self, inputs, targets=None):\n"
        "        for block in self.blocks:\n"
        "            inputs = block(inputs)\n"
        "        return self.head(inputs).float().square().mean()\n"
    ),
    "model": "model = GPT()",
    "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "sharded": "model, optimizer = zeroshard.shard(model, optimizer)",
    "batches": "batches = [torch.randn(2, 16) for _ in range(4)]",
    "loader": "loader = [(torch.randn(2, 16), None) for _ in range(4)]",
    "batch": "batch = torch.randn(2, 16)",
    "loss": "loss = model(torch.randn(2, 16))",
    "folder": "import tempfile; folder = tempfile.mkdtemp()",
}
"""Each name, and the lines that define it."""
NEEDS = {
    "model": ("GPT",),
    "optimizer": ("model",),
    "sharded": ("model", "optimizer"),
    "loss": ("model",),
}
"""Names that a definition uses. They are defined first."""


def preamble(asked: str) -> str:
    """The program that defines these names, and what they need, in the order of ``GIVEN``."""
    wanted = [name.strip() for name in asked.split(",")]
    unknown = [name for name in wanted if name not in GIVEN]
    assert not unknown, f"given: {unknown} is not defined in tests/docs/given.py"
    for name in wanted:
        wanted += [other for other in NEEDS.get(name, ()) if other not in wanted]
    return IMPORTS + "\n".join(lines for name, lines in GIVEN.items() if name in wanted) + "\n"
