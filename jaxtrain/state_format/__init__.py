"""A state on a disk: leaves under natural paths, cut into chunks, each with its digest.

`leaves.py` names what is stored, `slots.py` and `parts.py` say which device's part of an array is
which box of it, `pack.py` and `manifest.py` are the files, `reader.py` puts chunks together again.

Does not belong here: when a state is saved, where, and what becomes of old saves (checkpoint/). To
read first: ByteCheckpoint (Wan et al. 2024), for a format apart from how a state is split.
"""
