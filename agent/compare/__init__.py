"""`agent compare`: methods, scopes, protocols and budgets over the same tasks, and what differs."""
