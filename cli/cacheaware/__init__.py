"""The `cacheaware` command: composition of the other parts; it holds no policy of its own."""
