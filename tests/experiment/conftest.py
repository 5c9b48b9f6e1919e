from tiny import *  # noqa: F403
