"""Fine-tunes a causal language model with a loop of its own and Accelerate, on Python's language reference.

torchrun --nproc-per-node 2 examples/accelerate/finetune_zeroshard.py --model path/or/name

Without --model it trains a tiny Llama on bytes, built from its configuration, so that nothing is downloaded.
"""

import argparse
from pydoc_data.topics import topics  # the reference, as every Python brings it

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, get_scheduler

from zeroshard.integrations.accelerate import ShardedAccelerator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="folder or name of a pretrained model")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--report-every", type=int, default=10)
parser.add_argument("--out", default="finetuned")
args = parser.parse_args()

on_cpu = not torch.cuda.is_available()
accelerator = ShardedAccelerator(cpu=on_cpu, gradient_accumulation_steps=2, zeroshard={"stage": 3})
torch.manual_seed(0)

if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
else:
    tokenizer = ByT5Tokenizer()  # bytes: needs no files
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=args.sequence,
    )
    model = AutoModelForCausalLM.from_config(config)

tokens = torch.tensor(tokenizer("\n".join(topics.values())).input_ids)
windows = tokens[: len(tokens) // args.sequence * args.sequence].view(-1, args.sequence)
loader = DataLoader(windows, batch_size=args.batch, shuffle=True, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=args.steps // 10, num_training_steps=args.steps)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

model.train()
step = 0
while step < args.steps:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        if step % args.report_every == 0:
            accelerator.print(f"step {step}: loss {accelerator.gather(loss.detach()).mean().item():.7f}")
        if step == args.steps:
            break

accelerator.unwrap_model(model).save_pretrained(
    args.out, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
)
if accelerator.is_main_process:
    tokenizer.save_pretrained(args.out)
accelerator.end_training()
