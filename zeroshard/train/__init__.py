"""The ready-made jobs behind `zeroshard train` and `zeroshard finetune`, and their one ordinary training loop.

The room is a client of the library: it builds a plain model, calls `shard()` once, and trains. No file knows the
command line. Read `loop.py` first: it is one rank's whole run. `task.py` is the interface to what the loop trains.

`gpt_task.py` trains a GPT (`gpt.py`) on a corpus that every machine has (`data.py`). `language_task.py` trains a
Hugging Face model (`language_model.py`): `documents.py` reads files, `encoding.py` makes tokens of them and marks what
is learned, `packing.py` fills sequences, `dataset.py` joins these, `token_loss.py` is the loss, `forecast.py` asks the
plan, and `language_weights.py` writes the result, which `finetune_views.py` shows.

`record.py` is what the run measured, `probe.py` looks closely at a few steps, and `views.py` shows the record.
`checkpoints.py` saves and resumes a run, `gpt_weights.py` and `whole_weights.py` write the model. `tensor_parallel.py`
and `vocabulary.py` divide the model's matrices and its loss. `stopping.py` is what ends a run early, and
`rendezvous.py` keeps a job on one node off the network. The door is `loop.train` for one rank and `launch.launch` for
all ranks of a node.
"""
