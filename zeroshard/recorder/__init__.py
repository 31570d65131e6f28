"""Writes the journal of a training run while the run goes on, so that a report can show it.

The recorder hooks the sharded optimizer's ``step()``, reads what the ledger, the trace and the plan know anyway, and
writes lines (``report.journal``). It changes nothing of the run, and inside a step it never waits for the device: a
loss that is still being computed is written one or more steps later.

Read ``recorder`` first: ``Recorder`` is the door. ``facts`` puts together what each line says. ``late`` reads numbers
of the device without waiting for it.
"""
