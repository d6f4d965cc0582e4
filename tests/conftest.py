"""What all tests share: no hurry, and no silent gap where something is not installed."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A slow machine is not a bug: examples are limited by number, never by time.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

ALL_REQUIRED = os.environ.get("KVTIER_REQUIRE_ALL") == "1"
ELSEWHERE = "tests/compat/"  # run by `make test-vllm`


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """With KVTIER_REQUIRE_ALL=1 a skipped test has failed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _fail_if_required(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """So has a module that is skipped for a missing package."""
    report = yield
    if report.skipped:
        _fail_if_required(report)
    return report


def _fail_if_required(report: pytest.TestReport | pytest.CollectReport) -> None:
    if ALL_REQUIRED and not report.nodeid.startswith(ELSEWHERE):
        report.outcome = "failed"
        report.longrepr = f"skipped although KVTIER_REQUIRE_ALL=1: {report.longrepr}"
