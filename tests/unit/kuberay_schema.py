"""An extract, in our own words, of KubeRay's CRD for RayService (ray.io/v1, KubeRay 1.6): names and
types of the fields that an example may use. Pods are Kubernetes' own and checked for what we use.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]  # a JSON schema
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}  # numbers must be quoted
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def record(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


ENV = many(record(("name",), name=TEXT, value=TEXT, valueFrom={"type": "object"}))
RESOURCES = record(requests=TEXTS, limits=TEXTS)
CONTAINER = record(
    ("name", "image"),
    name=NAME,
    image=TEXT,
    env=ENV,
    command=many(TEXT),
    args=many(TEXT),
    ports=many(record(("containerPort",), containerPort=COUNT, name=NAME, protocol=TEXT)),
    resources=RESOURCES,
    volumeMounts=many(record(("name", "mountPath"), name=NAME, mountPath=TEXT, readOnly=FLAG)),
)
POD = record(
    ("containers",),
    containers=many(CONTAINER),
    nodeSelector=TEXTS,
    tolerations=many(record(key=TEXT, operator=TEXT, value=TEXT, effect=TEXT)),
    volumes=many(
        record(
            ("name",),
            name=NAME,
            persistentVolumeClaim=record(("claimName",), claimName=TEXT, readOnly=FLAG),
            emptyDir={"type": "object"},
        )
    ),
    serviceAccountName=TEXT,
)
TEMPLATE = record(("spec",), metadata={"type": "object"}, spec=POD)
HEAD = record(
    ("template",),
    template=TEMPLATE,
    rayStartParams=TEXTS,
    labels=TEXTS,
    resources=TEXTS,
    serviceType=TEXT,
    enableIngress=FLAG,
)
GROUP = record(
    ("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=NAME,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    idleTimeoutSeconds=COUNT,
    suspend=FLAG,
    rayStartParams=TEXTS,
    labels=TEXTS,
    resources=TEXTS,
    template=TEMPLATE,
)
CLUSTER = record(
    ("headGroupSpec",),
    rayVersion=TEXT,
    authOptions=record(mode={"enum": ["disabled", "token"]}, secretName=TEXT),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=record(
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        env=ENV,
        resources=RESOURCES,
        image=TEXT,
    ),
    headGroupSpec=HEAD,
    workerGroupSpecs=many(GROUP),
    gcsFaultToleranceOptions={"type": "object"},
    headServiceAnnotations=TEXTS,
    suspend=FLAG,
)
RAY_SERVICE = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=record(("name",), name=NAME, namespace=NAME, labels=TEXTS, annotations=TEXTS),
    spec=record(
        ("serveConfigV2", "rayClusterConfig"),
        serveConfigV2=TEXT,
        rayClusterConfig=CLUSTER,
        serveService={"type": "object"},
        excludeHeadPodFromServeSvc=FLAG,
        rayClusterDeletionDelaySeconds=COUNT,
        upgradeStrategy=record(
            type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]},
            clusterUpgradeOptions={"type": "object"},
        ),
    ),
)
