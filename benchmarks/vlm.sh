#!/usr/bin/env bash
# Two-stage VLM pruning of the embedded LLaVA: trains the variants, chooses on the validation questions, answers the test questions
# with each and with the controls at the same token counts, then measures times. FOLDER keeps the trained parts.
#   benchmarks/vlm.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:?a folder for the trained parts}
out=benchmarks/results
.venv/bin/python benchmarks/vlm_variants.py "$work"
for config in "$work"/*.yaml; do
  .venv/bin/tokensieve train "$config" --quiet
done
.venv/bin/python benchmarks/vlm_accuracy.py "$work" --split val --output "$work/val.json"
.venv/bin/python benchmarks/vlm_accuracy.py "$work" --split test --output "$out/trained_vlm.json"
counts() { # another method at the positions and counts of the two stages
  echo "$1@out:79($2) + $1@llm.3:48($2) + $1@llm.6:28($2) + $1@llm.9:14($2)" | sed 's/()//g'
}
parts="merger@out + cross@llm.3,6,9(rest=merge)" # with the weights that ship
anchors="anchor@out:79(k=79,rest=merge) + anchor@llm.3:48(k=48,rest=merge) + anchor@llm.6:28(k=28,rest=merge) + anchor@llm.9:14(k=14,rest=merge)"
.venv/bin/tokensieve eval --task vqa --dataset embedded-questions --max_new_tokens 4 --batch_size 50 --plan none \
  --compare "$parts" "$(counts random '')" "$(counts random rest=merge)" "$(counts grid '')" "$(counts grid rest=merge)" "$anchors" \
  --output "$out/vlm_{plan}.json"
.venv/bin/tokensieve bench --model_type vlm --model sieve-llava-8 --plan "$parts" --batch_size 1 16 --new_tokens 3 --repeats 20 \
  --break_even --output "$out/time_vlm.json"
