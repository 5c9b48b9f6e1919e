"""Compressed sums of gradients in a step: what they carry to the next one, and when they are exact.

Does not belong here: codecs and the compressed all-reduce itself (collectives/). To read first:
error feedback (Seide et al. 2014; Karimireddy et al. 2019) and PowerSGD (Vogels et al. 2019).
"""
