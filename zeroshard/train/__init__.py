"""The ready-made job behind `zeroshard train`: a GPT, a corpus that every machine has, and an ordinary training loop.

The room is a client of the library: it builds a plain model, calls `shard()` once, and trains. `gpt.py` and `data.py`
know nothing of sharding, and no file knows the command line. Read `loop.py` first: it is one rank's whole run.
`record.py` is what the run measured, `probe.py` looks closely at a few steps, and `views.py` shows the record.
`checkpoints.py` saves and resumes a run, `gpt_weights.py` writes the trained model. `tensor_parallel.py` and
`vocabulary.py` divide the model's matrices and its loss. `stopping.py` is what ends a run early, and
`rendezvous.py` keeps a job on one node off the network. The door is `loop.train` for one rank and `launch.launch` for
all ranks of a node.
"""
