"""The machines of a run: their presence, their processes, and layouts on fewer of them.

`machine.py` has the interfaces of a machine and of a process on it; `workers.py` is a process of
this machine. Other machines are reached through agents: `agent.py` runs there, `agents.py` is the
supervisor's side, `channel.py` the connection. `roster.py` chooses the machines of a start;
`elastic.py` finds the mesh for fewer, and `layouts.py` turns it into flags.

Not here: what failed, and whether to restart (fault_tolerance/). Read first: Bamboo (Thorpe et al.
2023) and Oobleck (Jang et al. 2023), for other answers to machines that come and go.
"""
