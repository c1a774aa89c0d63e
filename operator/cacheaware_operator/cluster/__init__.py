"""What a pool becomes in a cluster: pure functions from a plan to Kubernetes objects.

`objects.build_objects` gives all of them, for server-side apply with our field manager: each object has only the fields
that are ours, so that what others set beside them stays theirs. Who applies them, and when, is not decided here.
"""
