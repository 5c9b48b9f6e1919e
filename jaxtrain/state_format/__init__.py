"""A state on a disk: leaves under natural paths, cut into chunks, each with its digest.

`leaves.py` names the leaves, `slots.py` and `parts.py` map each device's part of an array to boxes
of the leaf, `pack.py` and `manifest.py` write the files, `reader.py` reads arrays from chunks.

Does not belong here: when and where a state is saved, removal of old saves (checkpoint/). To read
first: ByteCheckpoint (Wan et al. 2024), for a format apart from how a state is split.
"""
