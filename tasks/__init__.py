"""Task instances, where they come from, and how they are graded. Knows nothing of models."""
