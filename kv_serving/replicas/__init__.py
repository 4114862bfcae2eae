"""Several engines behind one address, on Ray Serve: the front, the router, the replicas."""

import os

# Read when ray.serve is imported, here and in the processes that Ray starts from here: calls to the front and the
# replicas go over gRPC, which takes half the time of Ray's own calls, and may be as large as bodies and answers are.
os.environ.setdefault("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")
os.environ.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(2**31 - 1))
