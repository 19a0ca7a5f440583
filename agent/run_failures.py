"""What can go wrong with a run that is the user's to mend: shown as one line, without a trace."""

from __future__ import annotations

from agent.chat import UnbridgeableTemplate
from agent.folder_lock import FolderBusy
from agent.model_errors import ModelError
from agent.run_state import NoState
from cache.support import UnsupportedModel
from environments import SandboxError
from tasks import TaskError

RUN_FAILURES: tuple[type[Exception], ...] = (
    FolderBusy,
    ModelError,
    NoState,
    SandboxError,
    TaskError,
    UnbridgeableTemplate,
    UnsupportedModel,
)
