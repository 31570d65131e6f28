"""Fine-tunes a causal language model of Hugging Face on Python's language reference.

torchrun --nproc-per-node 2 examples/huggingface/finetune_zeroshard.py --model path/or/name

Without --model it trains a tiny GPT-2 on bytes, built from its configuration, so that nothing is downloaded.
"""

import argparse
import os
from pydoc_data.topics import topics  # the reference, as every Python brings it

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GPT2Config, get_scheduler

import zeroshard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="folder or name of a pretrained model")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--report-every", type=int, default=10)
parser.add_argument("--out", default="finetuned")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
else:
    tokenizer = ByT5Tokenizer()  # bytes: needs no files
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=args.sequence,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)

tokens = torch.tensor(tokenizer("\n".join(topics.values())).input_ids)
windows = tokens[: len(tokens) // args.sequence * args.sequence].view(-1, args.sequence)
loader = DataLoader(windows[rank::world], batch_size=args.batch, shuffle=True, drop_last=True)

optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
model, optimizer = zeroshard.shard(model, optimizer, stage=3)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=args.steps // 10, num_training_steps=args.steps)

model.train()
step = 0
while step < args.steps:
    for batch in loader:
        batch = batch.to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % args.report_every == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.7f}")
        if step == args.steps:
            break

model.save_pretrained(args.out, state_dict=zeroshard.full_state_dict(model), is_main_process=rank == 0)
tokenizer.save_pretrained(args.out)
