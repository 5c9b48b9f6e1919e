"""Two Ray nodes on this machine, until the standard input ends. For the interpreter of an
environment that has `ray[default]`, which is none of ours: JAXTRAIN_RAY_PYTHON names it."""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": int(sys.argv[1]),
        },
    )
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    print("ready", flush=True)
    sys.stdin.read()
    cluster.shutdown()
