"""A tiny training of two-stage pruning, also for subprocesses."""

from __future__ import annotations

import pytest
import torch

from tokensieve.config.pruning import PruningTraining
from tokensieve.training.pruning.learner import PruningLearner


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A folder with a LLaVA of random weights: 49 vision tokens, a Llama of 4 layers, the embedded words."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    from tokensieve.embedded.recipes.llava_model import make_processor

    folder = tmp_path_factory.mktemp("tiny_llava")
    processor = make_processor((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    processor.patch_size, words = 16, processor.tokenizer
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=112, patch_size=16
    )
    text = LlamaConfig(
        vocab_size=len(words),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    torch.manual_seed(0)
    made = LlavaConfig(vision_config=vision, text_config=text, image_token_id=words.image_token_id, image_seq_length=49)
    LlavaForConditionalGeneration(made).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def settings(backbone, output="unused", *, how=None, method=None, **sections):
    rates = {name: {"lr": 1e-2} for name in ("token_merger", "layer_pruners", "discriminator")}
    return {
        "output": str(output),
        "backbone_settings": {"name": str(backbone)},
        "dataset_settings": {"name": "embedded", "train": {"limit": 24}, "val": {"limit": 6}},
        "trainer_settings": {
            "dl_settings": {
                "batch_size": 4,
                "epochs": 2,
                "optimizers": rates,
                "num_workers": 0,
                "max_new_tokens": 3,
                "device": "cpu",
                "checkpoint_every": 3,
            }
            | (how or {})
        },
        "method_settings": {
            "merger_type": "question_aware",
            "merge_ratio": 0.5,
            "pruning_layers": [1, 3],
            "target_prune_tokens": [15, 6],
            "pruner_d_internal": 16,
            "merger_hidden": 16,
            "disc_hidden": 16,
        }
        | (method or {}),
        **sections,
    }


def learner(backbone, **given):
    return PruningLearner(PruningTraining.model_validate(settings(backbone, **given)))


def weights(made):
    return {f"{group}.{name}": value for group, part in made.groups.items() for name, value in part.state_dict().items()}


def gradients(made):
    return {f"{group}.{name}": p.grad for group, part in made.groups.items() for name, p in part.named_parameters()}
