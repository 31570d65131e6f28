"""What a run tells while it goes on, and who is told: the terminal, JSON lines for machines, and loggers.

The loop makes an event of every step whose loss it reads, of every evaluation, and of the run's beginning and end. It
makes each event once, in one place, and gives it to every sink. A sink shows or writes it, and knows nothing of the
loop or the model. Only rank 0 has sinks.

Read `events.py` first: it has all events, and their fields are the keys of the JSON lines. `audience.py` has the sinks
together, and drops one that fails. The sinks are `terminal.py`, `json_lines.py` and `loggers.py`, which has one short
class for each library that draws curves.
"""
