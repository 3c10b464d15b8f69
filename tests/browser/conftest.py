"""Chromium, JupyterLab and the site, for tests that see what a reader sees. What is missing makes a test fail."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.notebook_rules import ROOT

SETTINGS = {
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # every cell is in the page
    "docmanager-extension/plugin": '{"autosave": false}',
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")


@dataclass
class Heard:
    """What a page said, and to whom it spoke."""

    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def listen(self, page: Any) -> None:
        page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is missing: `make browser` installs it", pytrace=False)
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail("no Chromium on this machine: `apt-get install chromium` installs Debian's", pytrace=False)
    with sync_playwright() as playwright:
        # A container's root has no sandbox.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.getuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def site() -> Path:
    folder = ROOT / "site"
    if not (folder / "index.html").is_file():
        pytest.fail("the site is not built: `make site` builds it", pytrace=False)
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab on a copy of the notebooks; it and its kernels are ended afterwards."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", home / "notebooks", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {name: str(home / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    names |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.port={port}"]
    command += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={home / 'notebooks'}"]
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(
            command,
            cwd=home,
            env=os.environ | names,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(address, server, home / "log")
        yield address
    finally:
        end_group(server)


def wait_for_server(address: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/api/status", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-3000:]}", pytrace=False)


def end_group(server: subprocess.Popen[bytes], seconds: float = 20) -> None:
    """End the server and its kernels, each of which leads a process group of its own."""
    import psutil

    if server.poll() is not None:
        return
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    server.send_signal(signal.SIGTERM)  # it ends its kernels
    _, alive = psutil.wait_procs(family, timeout=seconds)
    for process in alive:
        process.kill()
    _, alive = psutil.wait_procs(alive, timeout=seconds)
    assert alive == []
