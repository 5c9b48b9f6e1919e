"""Rotary position embedding: the rotation, and its scalings for longer sequences.

To read first: Su et al. 2021 (RoFormer), and Peng et al. 2023 (YaRN), whose section 2 goes through
the scalings before it.
"""
