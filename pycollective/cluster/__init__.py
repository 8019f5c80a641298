"""Who takes part: cluster descriptions, and the resolvers that find them out.

The resolvers stand under TensorFlow's path `pycollective.distribute.cluster_resolver`, and
`ClusterSpec` under `pycollective.train`. Nothing here opens a connection, but for the two resolvers
that ask Kubernetes or Google Compute Engine.
"""

from __future__ import annotations

from pycollective.cluster.gce import GCEClusterResolver
from pycollective.cluster.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
from pycollective.cluster.resolver import ClusterResolver, SimpleClusterResolver, UnionResolver
from pycollective.cluster.slurm import SlurmClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.cluster.tf_config import TFConfigClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
