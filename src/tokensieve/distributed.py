"""Several processes for one job: how they are found, and how they exchange values.

Every process computes its share of the batches. Process 0 gathers, decides and writes. Only plain objects on the CPU are sent
(gloo), so that it works the same on every device.
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
    """The processes of this job, and the rank of this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group_without_timeout: Any = None  # a group of the same processes that waits without a timeout

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all processes, by rank, in process 0; None in the others."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.is_main else None
        with translate_gloo_errors():
            dist.gather_object(value, values)
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank, in every process."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with translate_gloo_errors():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """The value of process 0, in every process. They wait for it without a timeout, as long as it lives."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        with translate_gloo_errors():
            dist.broadcast_object_list(box, group=self.group_without_timeout)
        return box[0]

    def run_on_main(self, work: Callable[[], Any]) -> Any:
        """Runs `work` in process 0; its result, or its UserError, is returned or raised in every process."""
        if self.size == 1:
            return work()
        result: Any = None
        problem: UserError | None = None
        if self.is_main:
            try:
                result = work()
            except UserError as error:
                problem = error
        result, message = self.broadcast((result, None if problem is None else str(problem)))
        if message is not None:
            raise problem or UserError(message)
        return result

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the block in process 0 first and then in the others, so that a download happens once."""
        if not self.is_main:
            self.broadcast(None)
        yield
        if self.is_main:
            self.broadcast(None)


@contextmanager
def join_processes(distributed: bool, timeout: int) -> Iterator[Processes]:
    """Joins the processes that torchrun or srun started.

    Args:
        distributed: join those of other launchers too.
        timeout: seconds that process 0 waits for the records of another process before the job fails.
    """
    processes = from_environment(os.environ, distributed)
    if processes.size == 1:
        yield processes
        return
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", _first_host(os.environ))
    step = 1000 * int(os.environ.get("SLURM_STEP_ID", 0)) + int(os.environ.get("SLURM_JOB_ID", 0))
    os.environ.setdefault("MASTER_PORT", str(20000 + step % 20000))
    with translate_gloo_errors():
        dist.init_process_group("gloo", rank=processes.rank, world_size=processes.size, timeout=timedelta(seconds=timeout))
        group_without_timeout = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    try:
        yield replace(processes, group_without_timeout=group_without_timeout)
    finally:
        dist.destroy_process_group()


def from_environment(variables: Mapping[str, str], distributed: bool = False) -> Processes:
    """This process by the variables of its launcher: of torchrun and srun always, of others with `distributed`.

    A batch script under SLURM has SLURM_NTASKS without being one of several tasks; only a step (srun) is.
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
    if not (distributed or torchrun or srun):
        return Processes()
    sizes = ("SLURM_STEP_NUM_TASKS",) if srun and not torchrun else SIZE
    processes = Processes(first(RANK, 0), first(sizes, 1), first(LOCAL_RANK, 0))
    if not 0 <= processes.rank < processes.size:
        rank, size = processes.rank, processes.size
        raise UserError(f"the launcher gives this process the rank {rank} of {size}: it must be 0 to {size - 1}.")
    return processes


def _first_host(variables: Mapping[str, str]) -> str:
    """The first host of a SLURM list such as node[03-07,11],gpu2; this machine where there is none."""
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    name, bracket, numbers = re.match(r"([^\[,]*)(\[?)([^\],-]*)", hosts).groups()  # type: ignore[union-attr]
    return name + numbers if bracket else name


@contextmanager
def translate_gloo_errors() -> Iterator[None]:
    """Errors of the connection between processes as a ProcessLostError of one line."""
    try:
        yield
    except RuntimeError as error:  # gloo raises it for a closed connection and for a timeout alike
        reason = one_line(error, 200)
        raise ProcessLostError(
            f"another process of this job ended or did not answer in time (eval has --timeout): {reason}"
        ) from error
