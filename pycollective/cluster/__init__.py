"""Descriptions of clusters, and the resolvers that find them.

TensorFlow's names for them are `pycollective.distribute.cluster_resolver` and
`pycollective.train.ClusterSpec`. Only the resolvers that ask Kubernetes, Google Compute Engine or
MPI open a connection.
"""

from __future__ import annotations

from pycollective.cluster.gce import GCEClusterResolver
from pycollective.cluster.indexed_job import KubernetesJobClusterResolver
from pycollective.cluster.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
from pycollective.cluster.ranked import (
    KubeflowClusterResolver,
    OpenMPIClusterResolver,
    PMIClusterResolver,
    RankedClusterResolver,
    TorchrunClusterResolver,
)
from pycollective.cluster.resolver import ClusterResolver, SimpleClusterResolver, UnionResolver
from pycollective.cluster.sagemaker import SageMakerClusterResolver
from pycollective.cluster.slurm import SlurmClusterResolver
from pycollective.cluster.sources import LaunchedClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.cluster.tf_config import TFConfigClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubeflowClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "KubernetesJobClusterResolver",
    "LaunchedClusterResolver",
    "OpenMPIClusterResolver",
    "PMIClusterResolver",
    "RankedClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
]
