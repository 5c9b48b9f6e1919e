"""A session: an experiment opened on a mesh, from its data to its compiled step.

`session.py` opens it, from nothing or from a checkpoint; `rows.py` and `batches.py` give it rows,
`evaluate.py` runs held-out ones. `check.py` reports what would be opened, without a device.

Not here: the loop over steps, saves and observers (run/), and what happens within a step (step/).
Read first: Check-N-Run (Eisenman et al. 2022), on state that is restored elsewhere.
"""
