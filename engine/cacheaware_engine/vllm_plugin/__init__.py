"""Tier quotas inside an unmodified vLLM: its scheduler and its blocks, run by the rules of `cacheaware_engine.blocks`.

`entry.Scheduler` is what vLLM is given as `--scheduler-cls`; start reading at `scheduler.py`. `seams.py` says which
places of vLLM the plugin stands on and in which versions they are as it expects. Besides the standard library the
plugin needs nothing but vLLM itself, so that it can be copied into any of its images.
"""
