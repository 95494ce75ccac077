"""Asks a gRPC server on this pod for its health over TLS, which the kubelet's own gRPC probe cannot.

Arguments: port, service, folder with tls.crt, tls.key and ca.crt, name in the certificate. Exit status 0: SERVING.
"""

import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

port, service, folder, server_name = sys.argv[1:]
# The pod's own certificate stands for the client's, should the server ask for one.
authority, key, certificate = (Path(folder, name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
credentials = grpc.ssl_channel_credentials(authority, key, certificate)
options = [("grpc.ssl_target_name_override", server_name)]
with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=4)
    except grpc.RpcError as error:
        sys.exit(f"no health: {error.code().name}: {error.details()}")
if answer.status != health_pb2.HealthCheckResponse.SERVING:
    sys.exit(f"health of {service!r}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
