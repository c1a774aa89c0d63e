"""Where the API server is and as whom we speak: from a kubeconfig, or from the pod's service account.

Reading those (contexts, exec plugins, tokens that rotate) is the official client's; requests are ours.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path

from kubernetes import client, config

from cacheaware_operator.errors import NoCluster

_ASK_AGAIN_SECONDS = 1.0


class Credentials:
    """The current ones; a token that is about to end is renewed when it is asked for."""

    def __init__(self, configuration: client.Configuration, clock: Callable[[], float] = time.monotonic) -> None:
        self._configuration = configuration
        self._clock = clock
        self._authorization: tuple[str, str] | None = None
        self._asked_at = float("-inf")

    @classmethod
    def load(cls, kubeconfig: Path | None) -> Credentials:
        """From the file; without one from the pod, else from $KUBECONFIG or ~/.kube/config. Raises `NoCluster`."""
        configuration = client.Configuration()
        try:
            if kubeconfig is not None:
                _from_file(configuration, str(kubeconfig))
            else:
                try:
                    config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]  # not annotated there
                except config.ConfigException:
                    _from_file(configuration, None)
        except (config.ConfigException, OSError) as error:
            raise NoCluster(f"no cluster to work with: {error}: run in a pod, or give --kubeconfig FILE") from error
        return cls(configuration)

    @property
    def server(self) -> str:
        return str(self._configuration.host).rstrip("/")

    @property
    def authorization(self) -> tuple[str, str] | None:
        """Scheme and token; None where a client certificate says who we are.

        The client is asked once a second at most: it reads its whole configuration anew to answer.
        """
        if self._clock() - self._asked_at >= _ASK_AGAIN_SECONDS:
            self._authorization, self._asked_at = self._asked(), self._clock()
        return self._authorization

    def _asked(self) -> tuple[str, str] | None:
        value = self._configuration.get_api_key_with_prefix("authorization", alias="BearerToken")
        if not value and self._configuration.username:
            value = self._configuration.get_basic_auth_token()
        if not value:
            return None
        scheme, _, token = str(value).partition(" ")
        return (scheme, token) if token else ("Bearer", scheme)

    @property
    def ca_file(self) -> str | None:
        return self._configuration.ssl_ca_cert

    @property
    def certificate(self) -> tuple[str, str] | None:
        """Files of certificate and key."""
        certificate, key = self._configuration.cert_file, self._configuration.key_file
        return (certificate, key) if certificate and key else None

    @property
    def insecure(self) -> bool:
        return not self._configuration.verify_ssl

    def tls(self) -> ssl.SSLContext | None:
        """None for a server that is reached without TLS (a local proxy)."""
        if not self.server.startswith("https:"):
            return None
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate is not None:
            context.load_cert_chain(*self.certificate)
        return context


def _from_file(configuration: client.Configuration, file: str | None) -> None:
    # not annotated there, as above; a renewed token is not written back: the file may be mounted read-only
    config.load_kube_config(file, client_configuration=configuration, persist_config=False)  # type: ignore[no-untyped-call]
