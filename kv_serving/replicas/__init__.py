"""Several engines behind one address, on Ray Serve: the front, the router, the replicas."""
