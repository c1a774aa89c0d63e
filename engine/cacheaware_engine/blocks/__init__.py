"""Block accounting: which request gets which KV blocks, who pays for them, who gives way. Standard library only.

The Torch engine, the vLLM plugin and the replay all run this package. Start at `pool.BlockPool`; the rules are in
`admission`, `victims`, `hits` and `quotas`, the words in `docs/designs/0001-one-pool-on-one-machine.md`.
"""

from .errors import BlockPoolError, NeverFits, QuotaRefused, StaleRevision, UnknownTier
from .keys import KEY_ALGORITHM, ROOT, BlockId, BlockKey, block_keys, next_key, root_of
from .owners import PUBLIC
from .pool import BlockPool, Layout
from .requests import Admission, Admitted, Ended, Grown, Growth, Request, Stage, Waiting, WaitReason, Yielded

__all__ = [
    "KEY_ALGORITHM",
    "PUBLIC",
    "ROOT",
    "Admission",
    "Admitted",
    "BlockId",
    "BlockKey",
    "BlockPool",
    "BlockPoolError",
    "Ended",
    "Grown",
    "Growth",
    "Layout",
    "NeverFits",
    "QuotaRefused",
    "Request",
    "Stage",
    "StaleRevision",
    "UnknownTier",
    "WaitReason",
    "Waiting",
    "Yielded",
    "block_keys",
    "next_key",
    "root_of",
]
