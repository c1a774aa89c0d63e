"""Effective values of optional fields: the one table of what an absent field means.

They are not written into an object: `spec` keeps what its author wrote, so that a later release may choose better.
`replicas` is the exception, a schema default as a Deployment has it, because autoscalers read it.

| field | absent means |
|---|---|
| `replicas` | 1 |
| `model.maxModelLen` | what the model was made for |
| `engine.image` | the release's own image for `engine.type` |
| `engine.kvCache.memory` | the engine decides (Torch: 1Gi; vLLM: what its GPU has left) |
| `engine.kvCache.blockSize` | the engine decides (Torch: 16 tokens; vLLM: what suits its device) |
| `engine.kvCache.dtype` | Auto, the compute type |
| `tiers[].priority`, `.weight` | 0; 1 |
| `tiers[].quota.nominalPercent` | 0: the tier lives on borrowed and unassigned blocks |
| `tiers[].quota.borrowingLimitPercent` | no limit |
| `tiers[].quota.lendingLimitPercent` | all of nominal may be lent |
| `tiers[].sla.timeToFirstToken`, `.timePerOutputToken` | nothing was promised |
| `tiers[].sla.attainmentPercent` | 95 |
| `tiers[].batchingWindow` | "0s": never held |
| `tiers[].retention` | idle blocks are protected as long as they are within the effective quota |
| `tiers[].admission` | Queue |
| `defaultTier` | a request without a tier is refused |
| `sharing` | Tenant; Tier with `identity.type: Open`, where nobody is known |
| `publicPercent` | 0 |
| `rebalancing` | off. In a section that is there: mode Auto, interval 30s, maxStepPercent 10, minGainPercent 1 |
"""

from __future__ import annotations

from enum import StrEnum

from cacheaware_api.wire import Admission, IdentityType, Sharing


class KVCacheDtype(StrEnum):
    """How keys and values are stored."""

    AUTO = "Auto"
    INT8 = "INT8"
    FP8 = "FP8"


class RebalancingMode(StrEnum):
    """What happens with a better split of the cache: done, only told, or not looked for."""

    AUTO = "Auto"
    DRY_RUN = "DryRun"
    OFF = "Off"


REPLICAS = 1
KV_CACHE_DTYPE = KVCacheDtype.AUTO
PRIORITY = 0
WEIGHT = 1
NOMINAL_PERCENT = 0
ATTAINMENT_PERCENT = 95
BATCHING_WINDOW = "0s"
ADMISSION = Admission.QUEUE
PUBLIC_PERCENT = 0
REBALANCING_MODE_WITHOUT_SECTION = RebalancingMode.OFF
REBALANCING_MODE = RebalancingMode.AUTO
REBALANCING_INTERVAL = "30s"
REBALANCING_MAX_STEP_PERCENT = 10
REBALANCING_MIN_GAIN_PERCENT = 1


def sharing(identity: IdentityType) -> Sharing:
    """Who shares with whom where `sharing` is absent: the narrowest group that can be told apart."""
    return Sharing.TIER if identity is IdentityType.OPEN else Sharing.TENANT
