#!/usr/bin/env bash
# Retrieval, caption selection, linear probe and captioning on the embedded data, and token fusion (about 15 minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
plans=(--plan none --compare "anchor:60(rest=merge)" "learned:60(rest=merge)" "random:60(rest=merge)" "grid:60(rest=merge)")
out=benchmarks/results
.venv/bin/tokensieve eval --dataset embedded-captions --recall_k 1 5 "${plans[@]}" --output "$out/retrieval_{plan}.json"
.venv/bin/tokensieve eval --dataset embedded-selection "${plans[@]}" --output "$out/selection_{plan}.json"
.venv/bin/tokensieve eval --task linear_probe --fewshot_k 16 --limit 4000 "${plans[@]}" --feature_root "${TMPDIR:-/tmp}/features" \
  --output "$out/probe_{plan}.json"
.venv/bin/tokensieve eval --task captioning --dataset embedded-captions --limit 300 --model sieve-coca-8 --pretrained captions-v1 \
  --plan none --compare "anchor:60(rest=merge)" "random:60(rest=merge)" "grid:60(rest=merge)" --output "$out/captions_{plan}.json"
for fusion in cls weighted mean; do
  .venv/bin/tokensieve eval --plan "anchor:60(rest=merge)" --token_fusion $fusion --output "$out/fusion_pruning_$fusion.json"
  .venv/bin/tokensieve eval --enable_token_selection --token_fusion $fusion --output "$out/fusion_selection_$fusion.json"
done
