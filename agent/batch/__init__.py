"""Many runs that survive interruption: items, where results are kept, the engine that works."""
