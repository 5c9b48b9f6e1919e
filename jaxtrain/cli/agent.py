"""`jaxtrain agent`: runs on each machine of a `launch --machines`."""

from __future__ import annotations

import argparse
import os
import socket

from jaxtrain.cli.shared import say, seconds_violations, signals_to
from jaxtrain.fault_tolerance.supervisor import own_command
from jaxtrain.machines.agent import Agent
from jaxtrain.machines.channel import read_address, read_key
from jaxtrain.violations import raise_violations


def add_options(agent: argparse.ArgumentParser) -> None:
    agent.add_argument("address", help="HOST:PORT at which the launch listens")
    text = "of this machine, another for each agent; default its host's"
    agent.add_argument("--name", default=socket.gethostname(), help=text)
    text = "seconds that a launch which is not there is looked for; default 3600"
    agent.add_argument("--wait", type=float, default=3600, help=text)


def agent_command(options: argparse.Namespace) -> int:
    raise_violations(seconds_violations("--wait", options.wait))
    agent = Agent(
        read_address(options.address, "ADDRESS"),
        read_key(os.environ),
        name=options.name,
        program=own_command(),
        wait_s=options.wait,
        tell=say,
    )
    with signals_to(agent.leave):
        return agent.run()
