"""What is read from the logs of each runner, on logs written down here as the runners print them.

The ids follow the data sets' convention (cut at the first blank by most parsers). That the official
parsers find the same is checked on generated logs in `test_swe_bench_oracle`.
"""

from __future__ import annotations

import pytest

from tasks.instance import TaskError
from tasks.log_parsers import PARSERS, REPOSITORIES, outcome_of, outcomes, parser_of


def read(name: str, log: str) -> dict[str, str]:
    return outcomes(PARSERS[f"parse_log_{name}"](log))


PYTEST = """\
============================= test session starts ==============================
collected 9 items

tests/test_a.py .FsxXE                                                   [100%]
==================================== PASSES ====================================
_________________________________ test_loud ____________________________________
----------------------------- Captured stdout call -----------------------------
 PASSED tests/test_a.py::test_indented
=========================== short test summary info ============================
PASSED tests/test_a.py::test_fine
PASSED tests/test_a.py::test_named[a b]
PASSED tests/test_a.py::TestIt::test_path[/usr/lib/x.txt]
SKIPPED [2] tests/test_a.py:7: not today
XFAIL tests/test_a.py::test_known
XPASS tests/test_a.py::test_surprise
ERROR tests/test_a.py::test_setup - RuntimeError: no
FAILED tests/test_a.py::test_wrong[x - y] - assert 1 == 2
FAILED tests/test_a.py::test_bad - assert 1 == 2
==== 2 failed, 3 passed, 2 skipped, 1 xfailed, 1 xpassed, 1 error in 0.1s =====
"""


def test_pytest_summary() -> None:
    assert read("pytest", PYTEST) == {
        "tests/test_a.py::test_fine": "passed",
        "tests/test_a.py::test_named[a": "passed",
        "tests/test_a.py::TestIt::test_path[/usr/lib/x.txt]": "passed",
        "tests/test_a.py::test_known": "xfailed",
        "tests/test_a.py::test_setup": "error",
        "tests/test_a.py::test_wrong[x": "failed",
        "tests/test_a.py::test_bad": "failed",
    }


def test_a_parameter_that_is_a_path_counts_by_its_last_part() -> None:
    found = read("pytest_options", PYTEST)
    assert "tests/test_a.py::TestIt::test_path[/x.txt]" in found
    assert set(found) - set(read("pytest", PYTEST)) == {
        "tests/test_a.py::TestIt::test_path[/x.txt]"
    }
    for kept in ("[//host/x]", "[/a/*/b]", "[a/b]", "[/a", "/a/b", ""):
        assert read("pytest_options", f"PASSED t.py::t{kept}") == {f"t.py::t{kept}": "passed"}
    assert read("pytest_options", "PASSED t.py::t[]-b c]") == {"t.py::t[]": "passed"}


def test_whole_ids_and_statuses_at_the_end_of_a_line() -> None:
    log = (
        PYTEST
        + "tests/test_b.py::test_old PASSED\n"
        + "tests/test_b.py::test_old[a b] FAILED\n"
        + "tests/test_b.py::test_new PASSED     [ 50%]\n"
        + "\x1b[32mPASSED\x1b[0m tests/test_b.py::\x1b[1mtest_colour\x1b[0m\n"
    )
    assert read("pytest_v2", log) == {
        "tests/test_a.py::test_fine": "passed",
        "tests/test_a.py::test_named[a b]": "passed",
        "tests/test_a.py::TestIt::test_path[/usr/lib/x.txt]": "passed",
        "tests/test_a.py::test_known": "xfailed",
        "tests/test_a.py::test_setup - RuntimeError: no": "error",
        "tests/test_a.py::test_wrong[x": "failed",
        "tests/test_a.py::test_bad": "failed",
        "tests/test_b.py::test_old": "passed",
        "tests/test_b.py::test_old[a b]": "failed",
        "tests/test_b.py::test_colour": "passed",
    }


def test_seaborn_reads_both_forms_of_a_pass() -> None:
    log = "tests/t.py::a PASSED [ 3%]\ntests/t.py::b[x y] PASSED [ 5%]\n PASSED \n" + PYTEST
    found = read("seaborn", log)
    assert found["tests/t.py::a"] == "passed"
    assert "tests/t.py::b[x" not in found
    assert found["tests/test_a.py::test_fine"] == "passed"
    assert found["tests/test_a.py::test_bad"] == "failed"
    assert "tests/test_a.py::test_known" not in found  # only passes and failures


def test_matplotlib_has_buttons_by_number() -> None:
    log = "PASSED lib/t.py::test[MouseButton.LEFT]\nFAILED lib/t.py::test[MouseButton.RIGHT] - x\n"
    assert read("matplotlib", log) == {"lib/t.py::test[1]": "passed", "lib/t.py::test[3]": "failed"}


DJANGO = """\
Testing against Django installed in '/testbed/django' with up to 2 processes
Creating test database for alias 'default'...
  Applying auth.0001_initial... OK
  Applying sites.0002_alter_domain_unique...test_no_migrations (a.tests.A) ... ok
  Applying sites.0002_alter_domain_unique...test_other (a.tests.A) ... ok
test_plain (a.tests.A) ... ok
test_doc (a.tests.A)
The first line of a docstring. ... ok
test_skipped (a.tests.A) ... skipped 'no database'
test_expected (a.tests.A) ... expected failure
test_bad (a.tests.A) ... FAIL
test_worse (a.tests.A) ... ERROR
test_prints (a.tests.A) ... Internal Server Error: /x/
Traceback (most recent call last):
ok
test_dotted (a.tests.A) ... some (name) ... ok
======================================================================
ERROR: test_worse (a.tests.A)
----------------------------------------------------------------------
FAIL: test_bad (a.tests.A)
FAIL:
Ran 9 tests in 0.123s
FAILED (failures=1, errors=1, skipped=1, expected failures=1)
"""


def test_django_runner() -> None:
    assert read("django", DJANGO) == {
        "test_no_migrations (a.tests.A)": "passed",
        "Applying sites.0002_alter_domain_unique...test_other (a.tests.A)": "passed",
        "test_plain (a.tests.A)": "passed",
        "The first line of a docstring.": "passed",
        "test_skipped (a.tests.A)": "skipped",
        "test_bad (a.tests.A)": "failed",
        "test_worse (a.tests.A)": "error",
        "test_prints (a.tests.A)": "passed",
        "test_dotted (a.tests.A) ... some (name)": "passed",
        "test_worse": "error",
        "test_bad": "failed",
    }


SYMPY = """\
============================= test process starts ==============================
sympy/core/tests/test_basic.py[6]
test_structure ok
test_slow - skipped s
test_known f
test_wrong F
test_broken E
test_last ok                                                              [FAIL]
________________________________________________________________________________
_________________ sympy/core/tests/test_basic.py:test_wrong __________________
Traceback (most recent call last):
  File "/testbed/sympy/core/tests/test_basic.py", line 3, in test_wrong
AssertionError
============= tests finished: 1 passed, 1 failed, 1 skipped, in 0.5 seconds =====
DO *NOT* COMMIT!
"""


def test_sympy_runner() -> None:
    assert read("sympy", SYMPY) == {
        "test_structure": "passed",
        "test_wrong": "failed",
        "test_broken": "error",
        "sympy/core/tests/test_basic.py:test_wrong": "failed",
    }


def test_of_several_statuses_the_worst_counts_in_any_order() -> None:
    order = ["PASSED", "XFAIL", "SKIPPED", "FAILED", "ERROR"]
    names = ["passed", "xfailed", "skipped", "failed", "error"]
    for better in range(5):
        for worse in range(better, 5):
            for pair in ((better, worse), (worse, better)):
                log = "".join(f"{order[status]} t.py::t\n" for status in pair)
                assert read("pytest", log) == {"t.py::t": names[worse]}
    assert read("django", "t (A) ... ERROR\nnoise\nok\n") == {"t (A)": "error"}


def test_an_id_cut_in_its_parameters_stands_for_those_that_begin_with_it() -> None:
    seen = {"t[a b]": "passed", "t[a c]": "xfailed", "t[x y]": "passed", "t[x z]": "failed"}
    assert outcome_of("t[a", seen) in ("passed", "xfailed")
    assert outcome_of("t[x", seen) == "missing"  # they do not agree
    assert outcome_of("t[x y", seen) == "passed"
    assert outcome_of("t[x z", seen) == "failed"
    assert outcome_of("t[a b]", seen) == "passed"
    assert outcome_of("t", seen) == "missing"  # no bracket is open
    assert outcome_of("t[a", {**seen, "t[a": "error"}) == "error"  # it is an id itself


def test_every_repository_has_a_parser_and_unknown_ones_are_told() -> None:
    for repo in REPOSITORIES:
        assert parser_of(repo) is PARSERS[REPOSITORIES[repo]]
    assert parser_of("some/other", "parse_log_django") is PARSERS["parse_log_django"]
    with pytest.raises(TaskError, match="no log parser is known for some/other"):
        parser_of("some/other")
    with pytest.raises(TaskError, match="'parse_log_jest' is not among"):
        parser_of("django/django", "parse_log_jest")
