"""`cacheaware demo`: one question, then the same mixed load with KV quotas off and on."""
