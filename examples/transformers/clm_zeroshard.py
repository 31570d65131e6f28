"""Trains a causal language model with Transformers' Trainer on Python's language reference.

torchrun --nproc-per-node 2 examples/transformers/clm_zeroshard.py --model path/or/name

Without --model it trains a tiny Llama on bytes, built from its configuration, so that nothing is downloaded.
"""

import argparse
from pydoc_data.topics import topics  # the reference, as every Python brings it

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    TrainingArguments,
    set_seed,
)

from zeroshard.integrations.transformers import ShardedTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="folder or name of a pretrained model")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--report-every", type=int, default=10)
parser.add_argument("--out", default="clm")
args = parser.parse_args()

set_seed(0)
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

tokens = tokenizer("\n".join(topics.values())).input_ids
windows = [tokens[start : start + args.sequence] for start in range(0, len(tokens) - args.sequence, args.sequence)]
data = [{"input_ids": window, "labels": window} for window in windows]

settings = TrainingArguments(
    output_dir=args.out,
    max_steps=args.steps,
    per_device_train_batch_size=args.batch,
    gradient_accumulation_steps=2,
    learning_rate=args.lr,
    logging_steps=args.report_every,
    save_steps=max(1, args.steps // 2),
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = ShardedTrainer(model, settings, train_dataset=data, processing_class=tokenizer, zeroshard={"stage": 3})
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.7f}")
