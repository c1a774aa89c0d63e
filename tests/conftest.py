"""What every test folder needs."""

import asyncio

from hypothesis import HealthCheck, settings

# A busy machine is no failure, and a run tries what the run before it tried: a change fails for what it changed.
# `pytest --hypothesis-profile=default` looks at other examples.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# looptime asks for the current event loop before every test; asked before any was set, asyncio would make one that
# nobody closes, and the warning about it fails whichever test the garbage collector runs in.
asyncio.set_event_loop(None)
