"""A real nginx with the documented configuration, in a folder of its own."""
from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests import programs
from tests.processes import ROOT
from tests.servers import free_port, wait_until

_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def documented() -> str:
    """The configuration of docs/proxies.md."""
    return re.findall(r"```nginx\n(.*?)```", (ROOT / "docs/proxies.md").read_text(), re.DOTALL)[0]


def without_prefix(configuration: str) -> str:
    """What the sentence below it says."""
    changed = configuration.replace("location /desk/", "location /").replace(
        "X-Forwarded-Prefix /desk;", 'X-Forwarded-Prefix "";')
    assert "desk" not in changed
    return changed


@contextlib.contextmanager
def nginx(folder: Path, configuration: str, web_port: int) -> Iterator[int]:
    """Serves this configuration in front of this port for the time of a test; gives its own port."""
    port = free_port()
    there = configuration.replace("listen 80;", f"listen 127.0.0.1:{port};").replace("8140", str(web_port))
    paths = "\n".join(f"{name}_temp_path {folder}/{name};" for name in _TEMPORARY)
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;\n"
        f"events {{ worker_connections 512; }}\nhttp {{ access_log off;\n{paths}\n{there} }}\n")
    argv = [programs.find("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(file)]
    with open(folder / "nginx.log", "wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: _listens(process, folder), 10, "nginx has started")
        yield port
    finally:
        process.terminate()
        process.wait(10)


def _listens(process: subprocess.Popen[bytes], folder: Path) -> bool:
    assert process.poll() is None, (folder / "nginx.log").read_text()
    return (folder / "nginx.pid").exists()
