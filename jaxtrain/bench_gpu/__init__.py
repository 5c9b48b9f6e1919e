"""`bench gpu`: measurements of one GPU, in parts that each run in a process of their own.

`runner.py` starts the parts of `parts.py` one after the other and stores their results; `worker.py`
is such a process. Each part compares one thing with its reference or its peer: `calibration.py`
the chip, `layer.py` attention's kernels, `model.py` a 1B model's step, `peer.py` the same in torch,
`experts.py` a mixture of experts, `saving.py` a checkpoint.

Does not belong here: predictions (planner/), and other benchmarks (bench/). To read
first: the roofline model (Williams et al. 2009), and what MFU is (Chowdhery et al. 2022, app. B).
"""
