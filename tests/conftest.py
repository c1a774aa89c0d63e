"""What every test folder needs."""

import asyncio

# looptime asks for the current event loop before every test; asked before any was set, asyncio would make one that
# nobody closes, and the warning about it fails whichever test the garbage collector runs in.
asyncio.set_event_loop(None)
