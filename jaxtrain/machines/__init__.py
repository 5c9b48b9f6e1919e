"""The machines of a run: which there are, what runs on them, and how it stands on fewer.

`machine.py` says what a supervisor asks of a machine and of a process there; `workers.py` is a
process of this machine. Others are reached through their agents: `agent.py` runs there, `agents.py`
is its other end, `channel.py` what they speak. `roster.py` chooses those of a start; `elastic.py`
finds the mesh for fewer, and `layouts.py` makes flags of it.

Does not belong here: what failed, and whether to begin again (fault_tolerance/). To read first:
Bamboo (Thorpe et al. 2023) and Oobleck (Jang et al. 2023), for what else one can do about machines
that come and go.
"""
