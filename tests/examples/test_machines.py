"""The SLURM script and the Dockerfile of examples/, as far as a machine without SLURM and Docker can try them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tokensieve.cli.parser import parse

SLURM, DOCKERFILE = ROOT / "examples" / "slurm_eval.sh", ROOT / "examples" / "Dockerfile"
STUBS = {  # srun starts its command once a node, as SLURM does; torchrun writes down what it is told
    "scontrol": '[ "$1 $2 $3" = "show hostnames node[7-9]" ] && printf "node7\\nnode8\\nnode9\\n"',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nfor i in 0 1 2; do SLURM_PROCID=$i "$@" & done; wait',
    "torchrun": 'printf "%s\\n" "$OMP_NUM_THREADS" "$@" > "$WRITTEN/$SLURM_PROCID"',
}
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[7-9]", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "8"}


def run_job(folder: Path, words: list[str], **more: str) -> list[list[str]]:
    """What torchrun is told on each node: threads, then its words."""
    (folder / "bin").mkdir()
    for name, lines in STUBS.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (folder / "bin" / name).chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= JOB | more | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "WRITTEN": str(folder)}
    done = subprocess.run(["bash", str(SLURM), *words], env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [(folder / str(rank)).read_text().splitlines() for rank in range(3)]


@pytest.mark.parametrize(
    "given, processes, threads", [({}, 1, 8), ({"SLURM_GPUS_ON_NODE": "4"}, 4, 2), ({"PROCESSES": "16"}, 16, 1)]
)
def test_the_script_starts_torchrun_on_every_node(tmp_path: Path, given: dict[str, str], processes: int, threads: int) -> None:
    from torch.distributed.run import get_args_parser

    words = ["--plan", "anchor(k=10,m=50)", "2x", "--output", "results/{plan}.json"]
    told = run_job(tmp_path, words, **given)
    assert told[0] == told[1] == told[2] and told[0][0] == str(threads)
    job = get_args_parser().parse_args(told[0][1:])  # as torchrun reads it
    assert (job.nnodes, job.nproc_per_node) == ("3", str(processes))
    assert (job.rdzv_backend, job.rdzv_endpoint, job.rdzv_id) == ("c10d", "node7:24711", "4711")
    assert job.module and [job.training_script, *job.training_script_args] == ["tokensieve", "eval", *words]


def test_the_example_in_the_script_is_understood() -> None:
    text = SLURM.read_text()
    example = re.search(r"# +sbatch .*?slurm_eval.sh (.*?\n#.*?)\n#\n", text, flags=re.S)
    assert example
    args = parse(["eval", *shlex.split(example[1].replace("\\\n#", ""))])
    assert args.plan == "2x" and args.compare == ["none"]
    assert subprocess.run(["bash", "-n", str(SLURM)]).returncode == 0 and os.access(SLURM, os.X_OK)


def instructions() -> list[tuple[str, str]]:
    """Those of the Dockerfile, with their arguments."""
    lines = [line for line in DOCKERFILE.read_text().replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_what_the_dockerfile_copies_installs_and_runs_exists() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = instructions()
    assert found[0][0] == "FROM" and re.fullmatch(r"python:3\.1[0-4]-slim", found[0][1])
    assert {name for name, _ in found} <= {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    for name, words in found:
        for copied in shlex.split(words)[:-1] if name == "COPY" else ():
            assert (ROOT / copied).exists(), copied
        for extras in re.findall(r"pip install '\.\[([\w,-]+)\]'", words) if name == "RUN" else ():
            assert set(extras.split(",")) <= set(project["optional-dependencies"])
    last = dict(found)
    copied = " ".join(words for name, words in found if name == "COPY")
    assert {"pyproject.toml", project["readme"], *project["license-files"]} <= set(copied.split())
    (entry,) = json.loads(last["ENTRYPOINT"])
    assert entry in project["scripts"] and parse(json.loads(last["CMD"])).command == "eval"
    assert "ray_encode.py /data/photos" in DOCKERFILE.read_text() and last["COPY"] == "examples/ray_encode.py ./"
    assert last["USER"] == "tokensieve" and any("useradd" in words for name, words in found if name == "RUN")
