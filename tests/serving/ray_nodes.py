"""Two Ray nodes with one CPU each, as processes of this machine: prints their address, and ends with its input."""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    print(nodes.address, flush=True)
    sys.stdin.read()
    nodes.shutdown()
