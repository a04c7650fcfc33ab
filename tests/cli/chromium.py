"""A real browser, without a window and without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from yarl import URL

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium")


def browse(page: Path | URL, profile: Path, *arguments: str, width: int, height: int = 900, dark: bool = False) -> str:
    """What Chromium writes to stdout about `page`: of a file when it has nothing more to do, of a server, which may
    always have more to say, after 4 s."""
    assert PROGRAM is not None
    scheme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [
            PROGRAM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--virtual-time-budget=10000" if isinstance(page, Path) else "--timeout=4000",
            *scheme,
            *arguments,
            page.as_uri() if isinstance(page, Path) else str(page),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


def screenshot(page: Path, profile: Path, *, width: int, height: int, dark: bool = False) -> Path:
    path = profile.with_suffix(".png")
    browse(page, profile, f"--screenshot={path}", width=width, height=height, dark=dark)
    return path
