"""Keeps the port that Serve opens in each replica on loopback, as Ray's other ports are there."""

import ray.util
from ray.serve._private import replica as serve_replica

LOOPBACK = "127.0.0.1"


def keep_ports_local() -> None:
    """Call this in a replica's constructor, after which Serve opens the port.

    Serve listens on all addresses and has no setting for it. Other machines of a cluster need the port.
    """
    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    add_port = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, address: add_port(
        server, address.replace("[::]", LOOPBACK)
    )
