"""Metrics, FLOP counts and traces of a run.

Here: metrics on disk and on the terminal, the FLOP counter, profiler traces. Not here: what a
compiled program does (program/), and anything that knows an experiment, a model or a train step.
Nothing here calls a collective.

Read: Chowdhery et al. 2022 (PaLM), appendix B, for model FLOPs utilisation; Korthikanti et al. 2022
(Reducing Activation Recomputation), section 6, for model against hardware FLOPs.
"""
