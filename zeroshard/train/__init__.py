"""The ready-made jobs behind `zeroshard train` and `zeroshard finetune`, and their one ordinary training loop.

The room is a client of the library: it builds a plain model, calls `shard()` once, and trains. No file knows the
command line. There are two jobs, each in a room of its own: `gpt/` trains a small GPT from nothing, `language/`
fine-tunes a Hugging Face model. What belongs to every job is here. A job imports from here, never from the other job;
`loop.py` alone knows which jobs there are.

Read `loop.py` first: it is one rank's whole run. `task.py` is the interface to what the loop trains. `rank.py` says
which rank this process is. `record.py` is what the run measured, `probe.py` looks closely at a few steps, and
`views.py` shows the record at the end. `live/` is what a run tells while it goes on. `checkpoints.py` saves and resumes
a run, `whole_weights.py` writes the trained weights, and `stopping.py` is what ends a run early. `launch.py` starts the
ranks of a node, and `rendezvous.py` keeps a job on one node off the network. The door is `loop.train` for one rank and
`launch.launch` for all ranks of a node.
"""
