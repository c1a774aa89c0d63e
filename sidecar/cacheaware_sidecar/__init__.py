"""The sidecar: the OpenAI-compatible front of one engine, which knows callers, tiers and the order of requests."""
