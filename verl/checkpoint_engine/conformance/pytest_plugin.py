"""A test for each route by which a running server gets weights.

    pytest -p verl_sync.conformance.pytest_plugin --weight-update-server URL --weight-update-model DIR

Tests in files run beside these only if the files are named.
With verl-sync its name is `verl.checkpoint_engine.conformance.pytest_plugin`. No entry point registers it: pytest would
rewrite the assertions of every module of the package, in every run of its users.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .verdicts import Report

OPTION = "--weight-update"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weight updates", "does a running server compute with the weights that it is sent")
    group.addoption(
        f"{OPTION}-server",
        metavar="URL",
        help="certify this server of vLLM or SGLang; it gets other weights and, at the end, its own",
    )
    group.addoption(
        f"{OPTION}-model", type=Path, metavar="DIR", help="the Hugging Face model directory that the server serves"
    )
    group.addoption(
        f"{OPTION}-routes",
        default="arena",
        metavar="R,...",
        help="a test for each: see --route of `certify`",
    )
    group.addoption(
        f"{OPTION}-pause-mode",
        choices=("wait", "abort", "keep"),
        default="wait",
        help="of requests in flight (default wait; routes of SGLang but disk need another)",
    )
    group.addoption(
        f"{OPTION}-level", choices=("quick", "full"), default="quick", help="see --level of `certify` (default quick)"
    )
    group.addoption(f"{OPTION}-timeout", type=float, default=300.0, metavar="S", help="of each call, in seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Raises UsageError for options that do not belong together."""
    given = [name for name in ("server", "model") if config.getoption(f"{OPTION}-{name}") is not None]
    if len(given) == 1:
        raise pytest.UsageError(
            f"{OPTION}-server URL and {OPTION}-model DIR belong together: {given[0]} alone is given"
        )
    if config.getoption(f"{OPTION}-timeout") <= 0:
        raise pytest.UsageError(f"{OPTION}-timeout must be more than 0")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Whoever names a server and no files wants these tests alone."""
    names_files = config.args_source is pytest.Config.ArgsSource.ARGS
    return None if names_files or config.getoption(f"{OPTION}-server") is None else True


@pytest.hookimpl(tryfirst=True)  # so that -k and -m choose among these, too
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(f"{OPTION}-server") is None:
        return
    items.extend(
        RouteItem.from_parent(session, name=f"weight_update[{route}]", route=route)
        for route in config.getoption(f"{OPTION}-routes").split(",")
    )


class RouteItem(pytest.Item):
    """Certifies the server over one route. Fails with the report; is skipped if the route needs a device."""

    def __init__(self, *, route: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.route = route

    def runtest(self) -> None:
        from ..errors import BackendUnavailable
        from ..memory.janitor import scratch_directory
        from ..parameter_server.checkpoint_directory import checkpoint_files
        from .command import Options, run

        model = self.config.getoption(f"{OPTION}-model").expanduser().absolute()
        checkpoint_files(model)
        options = Options(
            server=self.config.getoption(f"{OPTION}-server"),
            model=model,
            route=self.route,
            pause_mode=self.config.getoption(f"{OPTION}-pause-mode"),
            level=self.config.getoption(f"{OPTION}-level"),
            timeout_s=self.config.getoption(f"{OPTION}-timeout"),
        )
        with scratch_directory() as scratch:
            try:
                report = run(options, scratch)
            except BackendUnavailable as exc:
                pytest.skip(str(exc))
        if not report.passed:
            raise _NotCertified(report)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from ..errors import CheckpointEngineError
        from .report import as_text

        if isinstance(excinfo.value, _NotCertified):
            return as_text(excinfo.value.report)
        if isinstance(excinfo.value, CheckpointEngineError):
            return f"error: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path(self.config.getoption(f"{OPTION}-model")), None, self.name


class _NotCertified(Exception):
    """Carries the report of a server that does not compute with what it was sent."""

    def __init__(self, report: Report) -> None:
        super().__init__(", ".join(finding.fault for finding in report.findings))
        self.report = report
