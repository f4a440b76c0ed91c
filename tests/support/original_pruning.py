"""The configuration of two-stage VLM pruning as its authors' document shows it: no data set and no model are named."""

ORIGINAL = """\
trainer_settings:
  dl_settings:
    epochs: 1
    batch_size: 12
    optimizers:
      token_merger:
        lr: "2e-05"
      layer_pruners:
        lr: "2e-05"
      discriminator:
        lr: "5e-04"

method_settings:
  merger_type: "simple"
  merge_ratio: 0.5
  target_merge_tokens: 288
  merge_sparsity_weight: 1e-4
  pruning_layers: [10, 20, 31]
  pruner_d_internal: 512
  pruner_num_heads: 4
  pruner_type: "cross_attention"
  temperature: 1.0
  temperature_min: 0.1
  temperature_anneal_rate: 0.5
  adv_loss_weight: 1.0
  task_loss_weight: 25.0
  disc_reinit_prob: 0.01
  max_vision_tokens: 1200
  image_max_size: 800

manager_settings:
  mode: "single"
  available_gpus: [0,1,2,3]
  gpus_per_subtask: 2

search_settings:
  enable: false
  n_trials: 50
"""
