"""The operator: what a CacheAwarePool should become, and what its status says. Never on the data path."""
