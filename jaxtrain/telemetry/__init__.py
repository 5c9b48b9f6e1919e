"""What a run did, counted and written down.

Here: metrics on disk and on the terminal, the one FLOP counter, profiler traces, and the reader of
compiled HLO that tells what XLA made of a program. Not here: predictions of what a program will
cost (they are arithmetic over fields and meshes, and live with the planner), and anything that
knows an experiment, a model or a train step. Nothing in this room calls a collective.

Read: Chowdhery et al. 2022 (PaLM), appendix B, for model FLOPs utilisation; Korthikanti et al.
2022 (Reducing Activation Recomputation), section 6, for model against hardware FLOPs.
"""
