"""Trains a small language model on bytes with Lightning, which starts one process a device. Needs no files.

python examples/lightning/train_zeroshard.py
"""

import argparse
from pydoc_data.topics import topics  # the reference, as every Python brings it

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeroshard.integrations.lightning import ZeroshardStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--report-every", type=int, default=10)
parser.add_argument("--out", default="weights.ckpt")
args = parser.parse_args()


class LanguageModel(lightning.LightningModule):
    def __init__(self, sequence: int, hidden: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, hidden), nn.Embedding(sequence, hidden)
        blocks = (nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, 0.0, batch_first=True) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(x)

    def training_step(self, window: Tensor, index: int) -> Tensor:
        return nn.functional.cross_entropy(self(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Report(Callback):
    def on_train_batch_end(self, trainer: lightning.Trainer, module: LanguageModel, outputs: dict, *_: object) -> None:
        if trainer.is_global_zero and trainer.global_step % args.report_every == 0:
            print(f"step {trainer.global_step}: loss {outputs['loss'].item():.7f}", flush=True)


lightning.seed_everything(1337, verbose=False)
text = torch.tensor(list("\n".join(topics.values()).encode()))
windows = text[: len(text) // args.sequence * args.sequence].view(-1, args.sequence)
trainer = lightning.Trainer(
    devices=args.devices,
    max_steps=args.steps,
    gradient_clip_val=1.0,
    strategy=ZeroshardStrategy(stage=3),
    callbacks=[Report()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(LanguageModel(args.sequence), DataLoader(windows, batch_size=args.batch, shuffle=True))
trainer.save_checkpoint(args.out, weights_only=True)
