#!/usr/bin/env bash
# All controls, anchor and the learned selector at K = 98, 60 and 32, with rest=drop and rest=merge, on seen and held-out pairs
# (about 20 minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
plans=()
for k in 98 60 32; do
  for method in anchor random grid learned; do
    plans+=("$method:$k" "$method:$k(rest=merge)")
  done
  plans+=("pool:$k" "anchor:$k(k=$k,rest=merge)") # the second: all K are anchors, selected by CLS attention alone
done
.venv/bin/tokensieve eval --dataset embedded embedded-heldout --plan none --compare "${plans[@]}" "learned@6:60" \
  --output "benchmarks/results/{dataset}_{plan}.json"
