from __future__ import annotations

from typing import Any

import pytest

from cacheaware_api.testing import full_spec


@pytest.fixture
def pool() -> dict[str, Any]:
    """A valid pool in which every field of the model is set: tests break one thing of it."""
    return {
        "apiVersion": "cacheaware.dev/v1alpha1",
        "kind": "CacheAwarePool",
        "metadata": {
            "name": "chat",
            "namespace": "models",
            "labels": {"example.com/team": "search"},
            "annotations": {"note": "two\nlines"},
            "uid": "5a2c1f0e",
            "resourceVersion": "42",
            "generation": 3,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "deletionGracePeriodSeconds": 30,
            "finalizers": ["example.com/done"],
            "generateName": "chat-",
            "selfLink": "/chat",
            "ownerReferences": [],
            "managedFields": [{}],
        },
        "spec": full_spec(),
    }
