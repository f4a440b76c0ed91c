"""A search with nothing to learn: `search_toy.py search CONFIG ...` is `tokensieve search` with workers that run `train` below.

The score is best at an lr of 1e-3 and a weight_decay of 1; what else happens is told by TOY (JSON):
{"fault": {trial: word}, "processes": of a trial}.
Every step leaves a checkpoint, so that it can be seen where a trial went on.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from tokensieve import cli, config, training
from tokensieve.errors import UserError
from tokensieve.search import study, trial, workers


def train(path, resume, output, quiet, report):
    settings, wish = config.load(path), json.loads(os.environ.get("TOY", "{}"))
    fault = wish.get("fault", {}).get(output.name)
    checkpoint, tries = output / "step", output / "tries"
    start = int(checkpoint.read_text()) if resume and checkpoint.exists() else 0
    with tries.open("a") as file:
        file.write(f"{os.getpid()} {start}\n")
    first = len(tries.read_text().splitlines()) == 1
    score = -((math.log10(settings.optimizer.lr) + 3) ** 2) - (settings.optimizer.weight_decay - 1) ** 2
    for step in range(start, 3):
        report(step, {"score": score + step})
        checkpoint.write_text(str(step + 1))
        if fault == "killed" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs" and first:
            _wait_for_a_signal()
        if fault == "breaks":
            print("no such library", file=sys.stderr, flush=True)
            os._exit(3)
        if fault == "fails":
            raise UserError("nothing to learn")
    (output / "result.json").write_text(
        json.dumps({"score": score, "time": {"all": settings.phases[0].batch / 10}, "none": None})
    )


def _wait_for_a_signal():
    def stop(number, frame):
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    time.sleep(600)


if __name__ == "__main__":
    training.run = train
    workers.WORKER = (str(Path(__file__).resolve()),)
    study.HEARTBEAT, workers.PAUSE = 1, 0.05
    if several := json.loads(os.environ.get("TOY", "{}")).get("processes"):
        workers.find_slots = lambda *_: [workers.Slot("several processes", processes=several)]
    sys.exit(cli.main(sys.argv[1:]) if sys.argv[1] == "search" else trial.main(sys.argv[1:]))
