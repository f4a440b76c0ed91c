"""Several processes for one job: who they are, and what they tell each other.

Every process does its part of every batch list; process 0 gathers, decides and writes. Only plain objects on the CPU are sent
(gloo), so that it is the same on every device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from tokensieve.errors import ProcessLostError, UserError, one_line

RANK = ("RANK", "PMI_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
SIZE = ("WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True)
class Processes:
    """The processes of this job and which of them this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group_without_timeout: Any = None  # the same processes, for waiting without a time-out

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any] | None:
        """Everybody's value, by rank, in process 0; None in the others."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.is_main else None
        with translate_gloo_errors():
            dist.gather_object(value, values)
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank, in all of them."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with translate_gloo_errors():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Process 0's value, in all of them. While it computes, they wait as long as it lives."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        with translate_gloo_errors():
            dist.broadcast_object_list(box, group=self.group_without_timeout)
        return box[0]

    def run_on_main(self, work: Callable[[], Any]) -> Any:
        """Process 0 does it; what it returns, or the mistake it tells of, is everybody's."""
        if self.size == 1:
            return work()
        made: Any = None
        mistake: str | None = None
        if self.is_main:
            try:
                made = work()
            except UserError as error:
                mistake = str(error)
        made, mistake = self.broadcast((made, mistake))
        if mistake is not None:
            raise UserError(mistake)
        return made

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Process 0 goes first and the others after it, so that a download is done once."""
        if not self.is_main:
            self.broadcast(None)
        yield
        if self.is_main:
            self.broadcast(None)


@contextmanager
def join_processes(asked: bool, timeout: int) -> Iterator[Processes]:
    """The processes that torchrun or srun started, joined; with `asked`, also those that other launchers tell of.

    timeout: seconds that process 0 may wait for the records of another before the job is given up.
    """
    found = from_environment(os.environ, asked)
    if found.size == 1:
        yield found
        return
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", _first_host(os.environ))
    step = 1000 * int(os.environ.get("SLURM_STEP_ID", 0)) + int(os.environ.get("SLURM_JOB_ID", 0))
    os.environ.setdefault("MASTER_PORT", str(20000 + step % 20000))
    with translate_gloo_errors():
        dist.init_process_group("gloo", rank=found.rank, world_size=found.size, timeout=timedelta(seconds=timeout))
        group_without_timeout = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    try:
        yield replace(found, group_without_timeout=group_without_timeout)
    finally:
        dist.destroy_process_group()


def from_environment(variables: Mapping[str, str], asked: bool = False) -> Processes:
    """This process by what its launcher says: torchrun's and srun's variables always, others' where asked for.

    A batch script under SLURM sees SLURM_NTASKS without being one of several tasks; only a step (srun) is.
    """

    def first(names: tuple[str, ...], default: int) -> int:
        name = next((name for name in names if name in variables), None)
        if name is None:
            return default
        try:
            return int(variables[name])
        except ValueError:
            raise UserError(f"the environment variable {name}={variables[name]!r} is not a number.") from None

    torchrun = "RANK" in variables and "WORLD_SIZE" in variables
    srun = "SLURM_PROCID" in variables and first(("SLURM_STEP_NUM_TASKS",), 1) > 1
    if not (asked or torchrun or srun):
        return Processes()
    sizes = ("SLURM_STEP_NUM_TASKS",) if srun and not torchrun else SIZE
    found = Processes(first(RANK, 0), first(sizes, 1), first(LOCAL_RANK, 0))
    if not 0 <= found.rank < found.size:
        raise UserError(f"the launcher says process {found.rank} of {found.size}: it must be 0 to {found.size - 1}.")
    return found


def _first_host(variables: Mapping[str, str]) -> str:
    """The first host of a SLURM list such as node[03-07,11],gpu2; this machine where there is none."""
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    name, bracket, numbers = re.match(r"([^\[,]*)(\[?)([^\],-]*)", hosts).groups()  # type: ignore[union-attr]
    return name + numbers if bracket else name


@contextmanager
def translate_gloo_errors() -> Iterator[None]:
    """What goes wrong between processes, in one line."""
    try:
        yield
    except RuntimeError as error:  # gloo's word for a closed connection and for a time-out alike
        reason = one_line(error, 200)
        raise ProcessLostError(
            f"another process of this job ended or did not answer in time (eval has --timeout): {reason}"
        ) from error
