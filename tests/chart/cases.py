"""Values that the chart is rendered with: every example, and every switch in both positions."""

from __future__ import annotations

from typing import Any

import yaml

from tests.chart.helm import EXAMPLES

Values = dict[str, Any]

_GPU = {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}}
_SCALED = {"enabled": True, "minReplicas": 2, "maxReplicas": 6}

CASES: dict[str, Values] = {
    "default": {},
    **{example.stem: yaml.safe_load(example.read_text()) for example in EXAMPLES},
    "external redis": {"redis": {"mode": "external", "external": {"existingSecret": "store", "key": "url"}}},
    "redis in memory": {"redis": {"mode": "memory"}, "gateway": {"replicas": 1}},
    "persistent valkey": {
        "redis": {
            "embedded": {
                "auth": {"existingSecret": "valkey-password"},
                "persistence": {"enabled": True, "size": "2Gi", "storageClassName": "fast"},
                "nodeSelector": {"disk": "ssd"},
            }
        }
    },
    "given password": {"redis": {"embedded": {"auth": {"password": "correct-horse_battery.staple~7"}}}},
    "autoscaling": {
        "verifiers": [{"name": "target", "autoscaling": _SCALED}],
        "drafters": [{"name": "ngram", "method": ["ngram"], "autoscaling": {**_SCALED, "targetUtilization": None}}],
        "gateway": {"autoscaling": _SCALED},
    },
    "no network policy": {"networkPolicy": {"enabled": False}},
    "egress": {
        "networkPolicy": {
            "metricsNamespaces": ["monitoring", "observability"],
            "egress": {
                "enabled": True,
                "gatewayRules": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}],
                "replicaRules": [{"ports": [{"port": 3128, "protocol": "TCP"}]}],
            },
        }
    },
    "egress without hub": {
        "networkPolicy": {"egress": {"enabled": True, "modelHub": {"cidrs": []}}},
        "discovery": {"mode": "dns"},
    },
    "ingress": {
        "gateway": {
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
                "hosts": [{"host": "a.example.com"}, {"host": "b.example.com", "path": "/llm", "pathType": "Exact"}],
                "tls": [{"secretName": "web", "hosts": ["a.example.com"]}],
            },
            "service": {"type": "LoadBalancer", "annotations": {"example.com/lb": "internal"}},
        }
    },
    "api keys": {"apiKeys": {"values": {"team-a": "k" * 16, "team_b.2": "?!" * 10}}},
    "api keys from a secret": {"apiKeys": {"existingSecret": "keys", "key": "list"}},
    "tls": {"tls": {"enabled": True, "serverSecret": "replicas", "serverName": "replica.internal"}},
    "mutual tls": {
        "tls": {"enabled": True, "serverSecret": "replicas", "mutual": True, "clientSecret": "gateways"},
        "apiKeys": {"existingSecret": "keys"},
    },
    "caches": {
        "verifiers": [
            {"name": "own", "modelCache": {"type": "pvc", "size": "50Gi"}},
            {"name": "given", "replicas": 2, "modelCache": {"type": "pvc", "existingClaim": "models"}},
            {
                "name": "shared",
                "replicas": 2,
                "modelCache": {"type": "pvc", "accessModes": ["ReadWriteMany"], "storageClassName": "nfs"},
            },
        ]
    },
    "model in a volume": {
        "model": {
            "source": "/models/llama/llama.gguf",
            "name": "llama",
            "volume": {"existingClaim": "models", "subPath": "v1"},
        },
        "networkPolicy": {"egress": {"enabled": True, "modelHub": {"cidrs": []}}},
    },
    "converted on demand": {"model": {"source": "owner/some-gguf"}, "gateway": {"convertModel": True}},
    "tokenizer at hand": {"model": {"source": "smollm2-135m-instruct"}, "gateway": {"convertModel": False}},
    "hub": {"hub": {"token": {"existingSecret": "hub"}, "endpoint": "https://hub.example.com", "offline": True}},
    "discovery by dns": {"discovery": {"mode": "dns"}},
    "replicas elsewhere": {
        "verifiers": [],
        "drafters": [],
        "discovery": {"mode": "static", "static": {"verifiers": ["gpu1:50052", "[fd00::1]:50052"], "drafters": []}},
    },
    "no drafters": {"drafters": []},
    "several pools": {
        "verifiers": [
            {
                "name": "big",
                "resources": _GPU,
                "runtimeClassName": "nvidia",
                "priorityClassName": "serving",
                "image": {"repository": "example.com/own-verifier", "digest": "sha256:" + "0f" * 32},
                "podAnnotations": {"example.com/team": "ml"},
                "podLabels": {"team": "ml"},
                "affinity": {"podAntiAffinity": {}},
            },
            {"name": "mig", "resources": {"limits": {"nvidia.com/mig-3g.40gb": "1"}}, "dtype": "float16"},
            {"name": "cpu", "replicas": 3, "settings": {"max_sessions": 8, "cpu_affinity": [0, 1]}},
        ],
        "drafters": [
            {"name": "small", "model": "owner/small", "resources": _GPU, "strategy": {"type": "Recreate"}},
            {
                "name": "chain",
                "method": ["ngram", "draft_model"],
                "model": "owner/small",
                "device": "cpu",
                "env": [{"name": "MALLOC_ARENA_MAX", "value": "2"}],
                "extraVolumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
                "extraVolumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            },
        ],
    },
    "heads in drafters and in the verifier": {
        "model": {"source": "owner/target", "volume": {"existingClaim": "models"}},
        "verifiers": [
            {
                "name": "inside",
                "selfDraft": {"method": "eagle", "head": "/models/eagle"},
                "settings": {"self_draft_kv_bytes": 1048576, "eagle_topk": 4, "num_draft_tokens": 12},
            },
            {"name": "plain"},
            {"name": "copies", "selfDraft": {"method": "ngram"}},
        ],
        "drafters": [
            {"name": "medusa", "method": ["ngram", "medusa"], "head": "owner/medusa-heads"},
            {"name": "eagle", "method": ["eagle"], "head": "/models/eagle", "model": "/models/target"},
        ],
    },
    "layerskip": {
        "verifiers": [{"name": "target", "selfDraft": {"method": "layerskip"}, "settings": {"exit_layer": 8}}],
        "drafters": [{"name": "cut", "method": ["layerskip"], "settings": {"exit_layer": 8}}],
    },
    "names": {
        "fullnameOverride": "a-name-that-is-far-too-long-for-the-names-of-services",
        "commonLabels": {"team": "ml", "cost-center": "7"},
        "imagePullSecrets": [{"name": "registry"}],
        "images": {"registry": "registry.example.com/ml/", "tag": "1.2.3"},
        "gateway": {"podLabels": {"team": "web"}},
    },
    "monitoring": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusAnnotations": {"enabled": True},
    },
    "drain": {"drain": {"preStopSeconds": 0, "timeoutSeconds": 600, "terminationGracePeriodSeconds": 700}},
    "no replicas": {"verifiers": [{"name": "target", "replicas": 0}], "gateway": {"replicas": 0}},
    "disruption budgets": {
        "verifiers": [{"name": "target", "replicas": 4, "pdb": {"maxUnavailable": None, "minAvailable": "50%"}}],
        "drafters": [{"name": "ngram", "method": ["ngram"], "pdb": {"enabled": True}}],
        "gateway": {"pdb": {"enabled": False}},
    },
    "accounts": {
        "gateway": {"serviceAccount": {"create": False, "name": "own"}},
        "serviceAccount": {"annotations": {"example.com/role": "models"}},
    },
    "openshift": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    "gateway settings": {
        "gateway": {
            "settings": {
                "num_speculative_tokens": 6,
                "session_ttl_s": 1800.5,
                "draft_ahead": False,
                "max_body_bytes": 16777216,
            }
        }
    },
}
