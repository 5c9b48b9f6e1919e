"""Benchmarks: ratios of programs that take turns in one run, each with its peer.

Timed programs run in processes of their own (the `worker` modules), which print JSON lines. Does
not belong here: predictions (planner/), and anything that a training run imports. To read first:
Hoefler and Belli, "Scientific Benchmarking of Parallel Computing Systems" (2015).
"""
