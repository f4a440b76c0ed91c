"""Installs what the tests of the page need and is not there: Playwright, and Debian's chromium with a font.

python -m tests.browser.install
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

APT = ["apt-get", "-o", "Acquire::Retries=3", "-q"]
PACKAGES = ["chromium", "fonts-dejavu-core"]


def main() -> None:
    if importlib.util.find_spec("playwright") is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "playwright>=1.45"], check=True)
    if os.environ.get("TOKENSIEVE_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser"):
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        sys.exit("test-page needs the browser chromium: install it, or set TOKENSIEVE_BROWSER to a browser's file")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run([*APT, "update"], check=True, env=environment, stdout=subprocess.DEVNULL)
    install = [*APT, "install", "-y", "--no-install-recommends", *PACKAGES]
    subprocess.run(install, check=True, env=environment, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
