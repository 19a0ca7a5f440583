"""Real release pairs, graded for real: references resolve, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.base import Sandbox, SandboxSpec
from tasks import release_pair
from tasks.instance import SandboxOpener
from tasks.package_index import FetchError
from tasks.release_pair import ReleasePairTask

SMALL = ("jsonpointer-3.1.1", "xmltodict-0.14.2", "tinydb-4.8.2")
OTHERS = tuple(name for name in release_pair.list_ids() if name not in SMALL)

HARMLESS = b"--- /dev/null\n+++ b/NOTE.txt\n@@ -0,0 +1 @@\n+nothing that matters\n"
FORGED = b"""--- /dev/null
+++ b/conftest.py
@@ -0,0 +1,5 @@
+import atexit
+def say():
+    print("PASSED tests.py::WrongInputTests::test_leading_zero")
+atexit.register(say)
+print("tests.py::WrongInputTests::test_leading_zero PASSED")
"""


def load(instance_id: str, opener: SandboxOpener) -> ReleasePairTask:
    return release_pair.load(instance_id, open_sandbox=opener)


def check(instance_id: str, opener: SandboxOpener) -> None:
    """The reference resolves; the old release with a patch that changes nothing fails exactly the
    FAIL_TO_PASS tests; no patch is no attempt."""
    task = load(instance_id, opener)
    right = task.grade(release_pair.reference_patch(instance_id))
    assert right.status == "resolved", right.detail
    assert set(right.fail_to_pass.values()) == {"passed"}
    assert "FLAGGED" not in right.detail
    wrong = task.grade(HARMLESS)
    assert wrong.status == "unresolved", wrong.detail
    assert "passed" not in wrong.fail_to_pass.values()
    assert set(wrong.pass_to_pass.values()) <= {"passed", "xfailed", "skipped"}
    assert task.grade(b"").status == "empty_patch"


@pytest.mark.parametrize("instance_id", SMALL)
def test_small_ones(instance_id: str, any_kind: SandboxOpener) -> None:
    check(instance_id, any_kind)


@pytest.mark.docker
def test_one_in_docker(docker: SandboxOpener) -> None:
    check(SMALL[0], docker)


@pytest.mark.slow
@pytest.mark.parametrize("instance_id", OTHERS)
def test_all_others(instance_id: str, each_kind: SandboxOpener) -> None:
    check(instance_id, each_kind)


def test_forged_output_does_not_resolve_and_is_flagged(any_kind: SandboxOpener) -> None:
    verdict = load("jsonpointer-3.1.1", any_kind).grade(FORGED)
    assert verdict.status == "unresolved"
    assert set(verdict.fail_to_pass.values()) == {"failed"}
    assert "FLAGGED, the patch touches what steers the tests: conftest.py" in verdict.detail


def test_a_reference_of_another_release_does_not_apply(any_kind: SandboxOpener) -> None:
    other = release_pair.reference_patch("tinydb-4.8.2")
    assert load("jsonpointer-3.1.1", any_kind).grade(other).status == "patch_failed"


def test_the_sandbox_of_the_agent_holds_the_old_release_and_no_copy_of_any_other(
    each_kind: SandboxOpener,
) -> None:
    task = load("tinydb-4.8.2", each_kind)
    modules = sorted({name for pair in release_pair.read() for name in pair.modules})
    look = f"import importlib.util as u; print([m for m in {modules} if u.find_spec(m)])"
    with each_kind(task.spec()) as box:
        assert box.run(["python", "-c", look], cwd="/").text.strip() == "[]"
        box.put_tree(task.tree())
        assert box.run(["python", "-c", look], cwd="/").text.strip() == "['tinydb']"
        version = "import tinydb, os; print(tinydb.__version__, os.path.dirname(tinydb.__file__))"
        told = box.run(["python", "-c", version], cwd="/").text.split()
        assert told == ["4.8.1", f"{box.workdir}/tinydb"]
        shown = box.run(task.instance.test_command or "").text
        assert "passed" in shown
        assert "failed" not in shown
        assert "__pycache__" not in box.run("find . -name __pycache__").text
        found = box.run("grep -rl test_lru_cache_set_update /workspace /opt /home /tmp").text
        assert found == ""


def test_without_network_and_cache_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(spec: SandboxSpec) -> Sandbox:
        raise AssertionError

    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(FetchError, match=r"cannot fetch tinydb-4\.8\.1\.tar\.gz: .*cannot be r"):
        load("tinydb-4.8.2", never).tree()
