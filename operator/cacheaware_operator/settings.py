"""The operator's settings: flags parsed once into one frozen dataclass.

A missing, unknown or malformed flag ends the process with code 2 and one line that names it. The environment is read
for two facts that only the pod knows: its name (whose lease it is) and its namespace.
"""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

DEFAULT_NAMESPACE = "cacheaware-system"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Settings:
    """See `--help` for what each one means."""

    engine_image: str
    sidecar_image: str
    identity: str  # unique among the replicas of this operator
    lease_namespace: str
    namespaces: tuple[str, ...] = ()  # empty: the whole cluster
    metrics_host: str = ""  # every address: probes and Prometheus come from outside the pod
    metrics_port: int = 8080
    lease_name: str = "cacheaware-operator"
    kubeconfig: Path | None = None
    operator_namespace: str | None = None  # where we run, if in a pod: who may reach the pools' control side


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"cacheaware-operator: {message}\n")


def parse(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> Settings:
    """Settings from the command line; ends the process with code 2 on a bad one."""
    options = _build().parse_args(arguments)
    own = _own_namespace(environment)
    return Settings(
        engine_image=options.engine_image,
        sidecar_image=options.sidecar_image,
        identity=environment.get("POD_NAME") or socket.gethostname(),
        lease_namespace=options.lease_namespace or own or DEFAULT_NAMESPACE,
        namespaces=tuple(dict.fromkeys(options.namespace)),
        metrics_host=options.metrics_host,
        metrics_port=options.metrics_port,
        lease_name=options.lease_name,
        kubeconfig=options.kubeconfig,
        operator_namespace=own,
    )


def _build() -> argparse.ArgumentParser:
    parser = _Parser(prog="cacheaware-operator", description="Runs CacheAwarePools in a Kubernetes cluster.")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        type=_name,
        metavar="NAME",
        help="look after pools of this namespace only; may be given several times (default: of the whole cluster)",
    )
    parser.add_argument("--engine-image", required=True, metavar="IMAGE", help="image of the Torch engine")
    parser.add_argument("--sidecar-image", required=True, metavar="IMAGE", help="image of the sidecar")
    parser.add_argument(
        "--metrics-port",
        type=_port,
        default=8080,
        metavar="PORT",
        help="port of /metrics, /healthz and /readyz; 0: any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--metrics-host", default="", metavar="HOST", help="address to listen on for those (default: every one)"
    )
    parser.add_argument(
        "--lease-name",
        default="cacheaware-operator",
        type=_name,
        metavar="NAME",
        help="Lease by which one of several replicas is active (default: %(default)s)",
    )
    parser.add_argument(
        "--lease-namespace",
        type=_name,
        metavar="NAME",
        help=f"its namespace (default: the pod's own; outside a pod {DEFAULT_NAMESPACE})",
    )
    parser.add_argument(
        "--kubeconfig",
        type=_file,
        metavar="FILE",
        help="how to reach the cluster (default: the pod's service account, else $KUBECONFIG or ~/.kube/config)",
    )
    return parser


def _own_namespace(environment: Mapping[str, str]) -> str | None:
    if environment.get("POD_NAMESPACE"):
        return environment["POD_NAMESPACE"]
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text().strip() or None
    except OSError:
        return None  # not in a pod


def _name(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name: lower-case letters, digits and -, at most 63")
    return text


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 0 to 65535")
    return int(text)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file")
    return path
