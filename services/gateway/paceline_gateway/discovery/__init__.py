"""Finds the replicas of a pool: a fixed list, a DNS name, or the EndpointSlices of a Kubernetes service."""
