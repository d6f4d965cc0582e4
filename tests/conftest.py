"""What all tests share: no hurry, and no silent gap where the model tests should be."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A slow machine is not a bug: examples are limited by number, never by time.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

TORCH_REQUIRED = os.environ.get("KVTIER_REQUIRE_TORCH") == "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """With KVTIER_REQUIRE_TORCH=1 a skipped test that is marked `torch` has failed."""
    report = yield
    if TORCH_REQUIRED and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("torch"):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """With KVTIER_REQUIRE_TORCH=1 a module skipped for a missing package has failed."""
    report = yield
    if TORCH_REQUIRED and report.skipped and "could not import" in str(report.longrepr):
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    report.outcome = "failed"
    report.longrepr = f"skipped although KVTIER_REQUIRE_TORCH=1: {report.longrepr}"
