"""The README's lines, run one after the other as they stand, with the answers that stand below them."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT, Site
from tests.servers import wait_until

pytestmark = pytest.mark.acceptance

UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def blocks() -> list[tuple[str, str]]:
    """Each curl line (and cat) of the README with the answer below it."""
    found = re.findall(r"```console\n\$ ((?:curl|cat) .*)\n((?:.*\n)*?)```", (ROOT / "README.md").read_text())
    assert len(found) >= 6
    return found


def masked(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(UUID, "ID", text.replace("\r", ""))
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "MOMENT", text)
    return re.sub(r"(?m)^date: .*$", "date: DATE", text).strip()


def test_the_readmes_lines_do_what_they_say(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        site.start()
        site.wait_ready()
        ids: dict[str, str] = {}
        for line, expected in blocks():
            command = line.replace("127.0.0.1:8140", f"127.0.0.1:{site.port}").replace(
                "127.0.0.1:8141", f"127.0.0.1:{site.hook_port}").replace("var/hook.log", str(site.hook_log))
            for there, here in ids.items():
                command = command.replace(there, here)

            def says_it() -> bool:
                ran = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
                said.append(ran.stdout)
                return masked(ran.stdout) == masked(expected)

            said: list[str] = []
            if line.startswith("curl -i") or "-d" in line:
                assert says_it(), f"{line}\n{said[-1]}\ninstead of\n{expected}"
            else:  # what happens later
                wait_until(says_it, 20, f"{line} says {expected}")
            ids |= dict(zip(re.findall(UUID, expected), re.findall(UUID, said[-1])))
