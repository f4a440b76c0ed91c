"""A learner with everything the loop knows of: two networks against each other, two optimizers, a scheduler, an accelerator.

`python tests/support/toy_training.py OUTPUT [--resume]` is a whole `training.run`, also under torchrun. Faults come by TOY_*:
TOY_NAN=3 makes a loss of step 3 of process 1 (or of the only one) NaN, TOY_SLEEP=0.1 makes every step last,
TOY_TIMEOUT=5 is how many seconds processes wait for each other, TOY_HOLD=FILE makes step 9 wait until there is such a file
(a run that is to be stopped on its way is not at its end before, however slow the one who stops it is).
"""

from __future__ import annotations

import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from tokensieve import training
from tokensieve.config.registry import TRAININGS, TrainingSpec

STEPS, WIDTH, HELD = 12, 8, 9


class ToyLearner:
    monitor = ("distance", "min")

    def __init__(self, config: SimpleNamespace) -> None:
        from accelerate import Accelerator, InitProcessGroupKwargs

        patience = InitProcessGroupKwargs(timeout=timedelta(seconds=int(os.environ.get("TOY_TIMEOUT", "60"))))
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[patience])
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        self.steps = config.count
        self.maker: nn.Module = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, WIDTH))
        self.critic: nn.Module = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.maker, self.critic)]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9) for optimizer in optimizers]
        self.maker, self.critic, *self.optimizers = self.accelerator.prepare(self.maker, self.critic, *optimizers)
        self.schedulers = schedulers
        torch.manual_seed(self.rank)  # the noise differs between processes

    def step(self, index: int) -> dict[str, float]:
        time.sleep(float(os.environ.get("TOY_SLEEP", "0")))
        while index == HELD and "TOY_HOLD" in os.environ and not os.path.exists(os.environ["TOY_HOLD"]):
            time.sleep(0.005)
        for _ in range(2):  # two small batches make one step of the optimizers
            real = torch.from_numpy(np.random.randn(4, WIDTH)).float() + random.random()
            with self.accelerator.accumulate(self.maker, self.critic):
                fake = self.maker(torch.randn(4, WIDTH))
                judged = self.critic(torch.cat([real, fake.detach()]))
                critic_loss = judged[4:].mean() - judged[:4].mean() + judged.square().mean()
                self.accelerator.backward(critic_loss)
                for parameter in self.critic.parameters():
                    parameter.requires_grad_(False)
                # not through DDP's wrapper: it would wait for gradients of the critic and add them up at the wrong time
                maker_loss = -self._bare(self.critic)(fake).mean()
                self.accelerator.backward(maker_loss)
                for parameter in self.critic.parameters():
                    parameter.requires_grad_(True)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        bad = os.environ.get("TOY_NAN") == str(index) and self.rank == self.size - 1
        return {"maker": float("nan") if bad else maker_loss.item(), "critic": critic_loss.item()}

    @torch.no_grad()
    def evaluate(self, done: int) -> dict[str, float]:
        goal = torch.randn(64, WIDTH) + 0.5  # moves the global generator, which the loop puts back
        self.maker.eval()
        made = self._bare(self.maker)(torch.randn(64, WIDTH))
        self.maker.train()
        return {"distance": float((made.mean(0) - goal.mean(0)).norm()), "seen": done}

    def _bare(self, net: nn.Module) -> nn.Module:
        bare: nn.Module = self.accelerator.unwrap_model(net)
        return bare

    def exports(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"maker": self._bare(self.maker).state_dict(), "critic": self._bare(self.critic).state_dict()}

    def state(self) -> dict[str, object]:
        return {
            **self.exports(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def restore(self, state: dict[str, object]) -> None:
        self._bare(self.maker).load_state_dict(state["maker"])
        self._bare(self.critic).load_state_dict(state["critic"])
        for name in ("optimizers", "schedulers"):
            for one, saved in zip(getattr(self, name), state[name], strict=True):
                one.load_state_dict(saved)


TRAININGS.add(
    TrainingSpec(
        "toy",
        "two networks learn against each other",
        schema="tests.support.toy_training:config",
        learner="tests.support.toy_training:ToyLearner",
        export="tests.support.toy_training:export",
    ),
    origin="toy training",  # run as a script, the file is imported a second time under its own name
)


def export(learner: ToyLearner, run: Path) -> dict[str, object]:
    return {}


def config(**values: object) -> SimpleNamespace:
    """A section of a file, as far as `training.run` looks at it."""
    given = {"task": "toy", "threads": 1, "count": STEPS, "checkpoint_every": 3, "evaluate_every": 4}
    return SimpleNamespace(**given | values)


def main(output: str | Path, resume: bool) -> int:
    """A whole training as the command line does it; the exit code."""
    from tokensieve import cli

    def dispatch(_: object) -> int:
        training.run(config(count=int(os.environ.get("TOY_STEPS", STEPS))), resume, output, quiet=True)
        return 0

    cli.dispatch = dispatch
    return cli.main(["methods"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--resume" in sys.argv))
