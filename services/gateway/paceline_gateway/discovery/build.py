"""Makes the discovery that a target needs."""

from __future__ import annotations

from pathlib import Path

from paceline_gateway.discovery.dns import DnsDiscovery
from paceline_gateway.discovery.endpoint import Discovery
from paceline_gateway.discovery.static import StaticDiscovery
from paceline_gateway.discovery.targets import DnsTarget, StaticTarget, Target


def make_discovery(target: Target, *, dns_interval_s: float, kubeconfig_file: Path | None) -> Discovery:
    """The discovery of a pool.

    Args:
        target: where its replicas are.
        dns_interval_s: pause between two lookups of a dns:/// target, in seconds.
        kubeconfig_file: for a k8s:// target; None takes the pod's service account, or else the user's kubeconfig.
    """
    match target:
        case StaticTarget(addresses):
            return StaticDiscovery(addresses)
        case DnsTarget():
            return DnsDiscovery(target, dns_interval_s)
        case _:
            # Here, because the Kubernetes client takes a third of a second and 33 MB that others need not pay.
            from paceline_gateway.discovery.kubernetes_discovery import KubernetesDiscovery

            return KubernetesDiscovery(target, kubeconfig_file)
