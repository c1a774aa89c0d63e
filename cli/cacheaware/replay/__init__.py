"""Replay: request traces through the production code of a pool, in virtual time, beside other policies.

The index, the queue, the block accounting and the rebalancer are those that run in a pool; here are only what stands in
for the world (traces, a clock, an engine that is a cost model) and what is compared with. Start at `simulation`.
"""
