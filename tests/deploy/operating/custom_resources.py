"""JSON Schemas of the custom resources that the manifests use.

No package has them, so they are written by hand after the public definitions, of what the manifests
have and no more: whatever else is there is refused. Gateway API v1
(gateway.networking.k8s.io_httproutes.yaml), its Inference Extension v1
(inference.networking.k8s.io_inferencepools.yaml), llm-d-router v0.11
(llm-d.ai_inferenceobjectives.yaml, and the READMEs of its plugins), KubeRay v1
(ray.io_rayservices.yaml). Pod templates are left to Kubernetes' own schemas.
"""

from __future__ import annotations

from typing import Any

NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
GROUP = {"type": "string", "pattern": r"^$|^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
KIND = {"type": "string", "pattern": r"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$", "maxLength": 63}
TEXT = {"type": "string"}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
ANYTHING: dict[str, Any] = {"type": "object"}


def fields(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def several(items: dict[str, Any], least: int = 1, most: int = 16) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    about = {"apiVersion": {"const": api_version}, "kind": {"const": kind}}
    return fields({**about, "metadata": fields({"name": NAME}, labels=LABELS), "spec": spec})


PORT = fields({"number": {"type": "integer", "minimum": 1, "maximum": 65535}})
POOL = fields(
    {
        "selector": fields({"matchLabels": LABELS}),
        "targetPorts": several(PORT, most=8),
        "endpointPickerRef": fields(
            {"name": NAME},
            group=GROUP,
            kind=KIND,
            port=PORT,
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    }
)
ROUTE = fields(
    {
        "parentRefs": several(
            fields({"name": NAME}, group=GROUP, kind=KIND, namespace=NAME), 1, 32
        ),
        "rules": several(
            fields(
                {
                    "backendRefs": several(
                        fields(
                            {"name": NAME},
                            group=GROUP,
                            kind=KIND,
                            port=PORT["properties"]["number"],
                        )
                    )
                },
                matches=several(
                    fields(
                        {
                            "path": fields(
                                {
                                    "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                    "value": {"type": "string", "pattern": "^/"},
                                }
                            )
                        }
                    )
                ),
                timeouts=fields({}, request=DURATION, backendRequest=DURATION),
            )
        ),
    },
    hostnames=several(NAME),
)
OBJECTIVE = fields(
    {"poolRef": fields({"name": NAME}, group=GROUP, kind=KIND)},
    priority={"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
)
GROUP_OF_PODS = {
    "rayStartParams": {"type": "object", "additionalProperties": TEXT},
    "template": ANYTHING,
}
RAY = fields(
    {
        "serveConfigV2": TEXT,
        "rayClusterConfig": fields(
            {
                "headGroupSpec": fields(GROUP_OF_PODS),
                "workerGroupSpecs": several(
                    fields(
                        {**GROUP_OF_PODS, "groupName": NAME},
                        replicas=COUNT,
                        minReplicas=COUNT,
                        maxReplicas=COUNT,
                        numOfHosts=COUNT,
                    )
                ),
            },
            rayVersion=TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
        ),
    },
    rayClusterDeletionDelaySeconds=COUNT,
)
SCHEMAS = {
    kind: resource(api_version, kind, spec)
    for api_version, kind, spec in (
        ("inference.networking.k8s.io/v1", "InferencePool", POOL),
        ("gateway.networking.k8s.io/v1", "HTTPRoute", ROUTE),
        ("llm-d.ai/v1alpha2", "InferenceObjective", OBJECTIVE),
        ("ray.io/v1", "RayService", RAY),
    )
}

# The endpoint picker's own configuration, which is in a ConfigMap.
ENGINE = fields(
    {name: TEXT for name in ("name", "queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")},
    loraSpec=TEXT,
    cacheInfoSpec=TEXT,
)
PARAMETERS = {
    "metrics-data-source": fields({}, scheme={"enum": ["http", "https"]}, path=TEXT),
    "core-metrics-extractor": fields({}, defaultEngine=TEXT, engineConfigs=several(ENGINE)),
    "approx-prefix-cache-producer": fields({}),
    "queue-scorer": fields({}),
    "kv-cache-utilization-scorer": fields({}),
    "prefix-cache-scorer": fields({}),
}
PICKER = fields(
    {
        "apiVersion": {"const": "llm-d.ai/v1alpha1"},
        "kind": {"const": "EndpointPickerConfig"},
        "plugins": several(
            {
                "oneOf": [
                    fields({"type": {"const": kind}}, parameters=parameters)
                    for kind, parameters in PARAMETERS.items()
                ]
            }
        ),
        "schedulingProfiles": several(
            fields(
                {
                    "name": TEXT,
                    "plugins": several(fields({"pluginRef": TEXT}, weight={"type": "number"})),
                }
            )
        ),
    }
)
