"""A tiny re-identification training, also for subprocesses."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tokensieve.reid.config import ReidTraining
from tokensieve.reid.training import ReidLearner

CAMERAS, SHOTS = 2, 2


def write_shot(folder, split, pid, camera, number, rng):
    """Three images of one object: each identity has its own stripes in each modality; noise, and the camera's tint."""
    name = f"{pid:06d}_cam{camera + 1}_0_{number:02d}.jpg"
    for place, modality in enumerate(("RGB", "NI", "TI")):
        own = np.random.default_rng([pid, place]).integers(0, 255, (4, 1, 3))
        pixels = np.repeat(np.repeat(own, 8, 0), 16, 1) + 15 * camera + rng.normal(0, 12, (32, 16, 3))
        where = folder / split / modality
        where.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(where / name, quality=95)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_root(tmp_path_factory.mktemp("data"))


def write_root(parent):
    """RGBNT201's layout: 9 identities to train on and 3 to test, 4 shots each, images of 32 x 16 pixels."""
    folder, rng = parent / "RGBNT201", np.random.default_rng(0)
    for split, pids in (("train_171", range(1, 10)), ("test", range(20, 23))):
        for pid in pids:
            for camera in range(CAMERAS):
                for number in range(SHOTS):
                    write_shot(folder, split, pid, camera, number, rng)
    return folder.parent


def settings(root, output="unused", *, model=None, how=None, loader=None, **sections):
    """A transformer of 2 blocks and width 32, 32 patches; 4 identities x 2 shots in a step; 3 of 9 identities to choose by."""
    made = {
        "MODEL": {
            "LIBRARY": "timm",
            "TRANSFORMER_TYPE": "vit_tiny_patch16_224",
            "PRETRAINED": "",
            "ARGUMENTS": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2},
            "STRIDE_SIZE": [4, 4],
        }
        | (model or {}),
        "INPUT": {"SIZE": [32, 16], "PADDING": 2},
        "DATASETS": {"NAMES": "RGBNT201", "ROOT_DIR": str(root), "VAL_IDENTITIES": 3},
        "DATALOADER": {"NUM_INSTANCE": 2, "NUM_WORKERS": 0, "KEEP_IN_MEMORY": True} | (loader or {}),
        "SOLVER": {
            **{"IMS_PER_BATCH": 8, "BASE_LR": 2e-3, "BACKBONE_LR": 1e-3, "WARMUP_EPOCHS": 1, "MAX_EPOCHS": 4},
            **{"DEVICE": "cpu", "EVAL_PERIOD": 2, "CHECKPOINT_PERIOD": 1},
        }
        | (how or {}),
        "OUTPUT_DIR": str(output),
    }
    return made | sections


def learner(root, **given):
    return ReidLearner(ReidTraining.model_validate(settings(root, **given)))
