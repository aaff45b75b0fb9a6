"""The sharding engine: parameters, parameter groups, units, and the runtime of a root with its hooks."""
