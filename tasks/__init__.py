"""Task instances, where they come from, and how they are graded. Knows nothing of models."""

from tasks.instance import Instance, Task, TaskError, Verdict

__all__ = ["Instance", "Task", "TaskError", "Verdict"]
