"""The engine: who is charged for KV blocks, what is evicted, who is preempted; and attention over them."""
