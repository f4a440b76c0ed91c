#!/usr/bin/env bash
# Makes a virtual environment on top of another one, and installs packages into it: layered_venv.sh BASE FOLDER PACKAGE...
# It sees what BASE has installed; BASE is not changed. What is installed here comes first.
set -euo pipefail
base=$1 venv=$2
shift 2
[ -x "$venv/bin/python" ] || "$base/bin/python" -m venv "$venv"
purelib='import sysconfig; print(sysconfig.get_paths()["purelib"])'
below=$("$base/bin/python" -c "$purelib")
echo "import site; site.addsitedir('$below')" > "$("$venv/bin/python" -c "$purelib")/below.pth"
"$venv/bin/python" -m pip install --quiet "$@"
