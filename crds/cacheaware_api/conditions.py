"""Condition types of a pool's status, and the reasons that each may give: constants, so that alerts can rely on them.

`Ready`, `Reconciling` and `Stalled` follow kstatus, which Flux and Argo CD read; `Ready` does not depend on SLAs.
`Reconciling` and `Stalled` are there only while they are True; the others are Unknown until known.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    QUOTA_ENFORCED = "QuotaEnforced"
    IDENTITY_ENFORCED = "IdentityEnforced"
    METRICS_FRESH = "MetricsFresh"
    SLA_MET = "SLAMet"
    PREFIX_CACHING_EFFECTIVE = "PrefixCachingEffective"
    PUBLIC_PREFIXES_RESIDENT = "PublicPrefixesResident"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Why a condition has its status. One word per cause, under the condition it belongs to."""

    NOT_KNOWN_YET = "NotKnownYet"  # any condition, with status Unknown

    # Ready
    ALL_REPLICAS_READY = "AllReplicasReady"
    REPLICAS_NOT_READY = "ReplicasNotReady"
    SCALED_TO_ZERO = "ScaledToZero"

    # Reconciling
    STARTING = "Starting"
    ROLLING_OUT = "RollingOut"
    SCALING = "Scaling"
    APPLYING_VIEW = "ApplyingView"
    RESTARTING = "Restarting"  # a part died and is started again, with back-off

    # Stalled
    INVALID_SPEC = "InvalidSpec"
    NOT_SUPPORTED = "NotSupported"  # a replica cannot do what the view asks of it
    FIELD_CONFLICT = "FieldConflict"
    SCHEMA_OUTDATED = "SchemaOutdated"
    SECRET_NOT_FOUND = "SecretNotFound"
    SECRET_INVALID = "SecretInvalid"
    CONFIG_MAP_NOT_FOUND = "ConfigMapNotFound"
    CRASH_LOOP = "CrashLoop"

    # QuotaEnforced
    ENFORCED_BY_ENGINE = "EnforcedByEngine"
    ESTIMATE_ONLY = "EstimateOnly"
    CAPACITY_UNKNOWN = "CapacityUnknown"  # as EstimateOnly, and not even the size of the cache is known
    UNSUPPORTED_VERSION = "UnsupportedVersion"  # as EstimateOnly, because the plugin does not know this vLLM
    QUOTA_REFUSED = "QuotaRefused"

    # IdentityEnforced
    API_KEYS = "APIKeys"
    TRUSTED_HEADERS = "TrustedHeaders"
    OPEN = "Open"

    # MetricsFresh
    FRESH = "Fresh"
    STALE = "Stale"

    # SLAMet
    ALL_TIERS_MET = "AllTiersMet"
    TIERS_MISSED = "TiersMissed"
    NO_SLA = "NoSLA"
    NO_TRAFFIC = "NoTraffic"
    NOT_MEASURED = "NotMeasured"  # there were requests, and none of them streamed

    # PrefixCachingEffective
    HITS_SEEN = "HitsSeen"
    NO_HITS = "NoHits"
    BLOCKS_TOO_LARGE = "BlocksTooLarge"  # no prompt fills one, and only whole ones are shared

    # PublicPrefixesResident
    RESIDENT = "Resident"
    NOT_RESIDENT = "NotResident"
    NO_PUBLIC_PREFIXES = "NoPublicPrefixes"
    SHARE_TOO_SMALL = "ShareTooSmall"
