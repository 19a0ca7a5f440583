"""Instances of SWE-bench as tasks: the tree is in the instance's image, the tests are official."""

from __future__ import annotations

from environments.base import SandboxSpec
from tasks.instance import Instance, SandboxOpener, TaskError, Verdict
from tasks.log_parsers import parser_of
from tasks.swe_bench_eval import TIMEOUT, Evaluation, evaluate
from tasks.swe_bench_rows import SweRow
from tasks.swe_bench_script import eval_script, pytest_command, recipe_of, test_files

_LIMITS = {"memory_mb": 4096, "pids": 1024, "cpus": 2.0}  # test suites want more than a shell


class SweBenchTask:
    """A row as a `Task`. Classic rows get image, script and log parser from what is known of their
    repository. TaskError if a row cannot be graded here.

    `network` says whether commands of the grading sandbox reach one (None: where the repository's
    tests or its installation need it); the agent's sandbox has none.
    """

    def __init__(
        self,
        row: SweRow,
        open_sandbox: SandboxOpener | None = None,
        *,
        timeout: float = TIMEOUT,
        network: bool | None = None,
    ) -> None:
        self.row = row
        self.image = row.image or row.default_image
        self.instance = Instance(
            instance_id=row.instance_id,
            problem=row.problem_statement,
            package=row.repo,
            test_command=_present_tests(row),
        )
        self._open_sandbox = open_sandbox or _opener()
        self._network = _needs_network(row) if network is None else network
        try:
            self.evaluation = _evaluation(row, timeout)
        except TaskError as error:
            raise TaskError(f"{row.instance_id} cannot be graded: {error}") from error

    def tree(self) -> None:
        """None: it is in the image."""
        return

    def spec(self) -> SandboxSpec:
        """A sandbox of the instance's image."""
        return SandboxSpec.model_validate({"image": self.image, "limits": _LIMITS})

    def grade(self, patch: bytes) -> Verdict:
        """Grade in a fresh sandbox by the official rules. Status `error`: it was not judged."""
        limits = {**_LIMITS, "network": self._network}
        spec = SandboxSpec.model_validate({"image": self.image, "limits": limits})
        return evaluate(self.evaluation, patch, spec, self._open_sandbox)


def _evaluation(row: SweRow, timeout: float) -> Evaluation:
    if row.eval_type != "pass_and_fail":
        raise TaskError(
            f"eval_type {row.eval_type} counts tests without a result as passed, which only logs "
            "of JavaScript suites need; use the official harness for it"
        )
    return Evaluation(
        script=_script(row),
        parser=parser_of(row.repo, row.log_parser),
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        test_files=test_files(row.test_patch).all,
        # what pytest's own patches touch always steers the tests
        import_roots=() if row.repo == "pytest-dev/pytest" else (".", "src", "lib"),
        timeout=timeout,
    )


def _script(row: SweRow) -> str:
    return row.eval_script or eval_script(row.repo, row.version, row.base_commit, row.test_patch)


def _present_tests(row: SweRow) -> str | None:
    """How an agent runs the tests that are there; which ones decide is not to be known."""
    try:
        test = recipe_of(row.repo, row.version).test
    except TaskError:
        test = "pytest" if row.eval_script and pytest_command(row.eval_script) else ""
    return "python -m pytest -q" if test.startswith(("pytest", "tox")) else test or None


def _needs_network(row: SweRow) -> bool:
    try:
        return recipe_of(row.repo, row.version).network
    except TaskError:
        return False


def _opener() -> SandboxOpener:
    from environments import open_sandbox

    return open_sandbox
