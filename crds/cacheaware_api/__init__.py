"""What the fields of a CacheAwarePool mean, and the messages between the parts.

`wire`, `quota` and `durations` are standard library only, because the engine imports them; the models of the object
(`v1alpha1`) need pydantic and are imported where objects are parsed.
"""
