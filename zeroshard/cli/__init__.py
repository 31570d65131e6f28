"""The `zeroshard` command, with one module for each subcommand.

The room knows how options are written, which mistakes can be found before anything starts, and how answers are
printed. It computes nothing itself: `train/`, `plan/` and `storage/` do. Read `main.py` first: it says what a
subcommand consists of. `job_options.py` has the options that `train` and `dryrun` share. The door is `main.main`.
"""
