#!/usr/bin/env bash
# Two-stage VLM pruning of the embedded LLaVA: trains both stages and the ablations, answers the test questions with each and with
# the controls at the same token counts, then measures times. FOLDER keeps the trained parts (about 45 minutes on two cores).
#   benchmarks/vlm.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:?a folder for the trained parts}
out=benchmarks/results
.venv/bin/python benchmarks/vlm_variants.py "$work"
for variant in question_aware simple no_merger no_pruners no_discriminator; do
  .venv/bin/tokensieve train "$work/$variant.yaml" --quiet
done
plan() { .venv/bin/python -c 'import json, sys; print(json.load(open(sys.argv[1]))["plan"])' "$work/$1/card.json"; }
counts() { # another method at the positions and counts of the two stages
  echo "$1@out:79($2) + $1@llm.3:48($2) + $1@llm.6:28($2) + $1@llm.9:14($2)" | sed 's/()//g'
}
anchors="anchor@out:79(k=79,rest=merge) + anchor@llm.3:48(k=48,rest=merge) + anchor@llm.6:28(k=28,rest=merge) + anchor@llm.9:14(k=14,rest=merge)"
eval=(.venv/bin/tokensieve eval --task vqa --dataset embedded-questions --max_new_tokens 4 --batch_size 50)
"${eval[@]}" --plan none --compare "$(plan question_aware)" "$(counts random '')" "$(counts random rest=merge)" "$(counts grid '')" \
  "$(counts grid rest=merge)" "$anchors" --weights "$work/question_aware" --output "$out/vlm_{plan}.json"
for variant in simple no_merger no_pruners no_discriminator; do
  "${eval[@]}" --plan "$(plan $variant)" --weights "$work/$variant" --output "$out/vlm-$variant.json"
done
"${eval[@]}" --plan "merger@out + cross@llm.3,6,9" --weights "$work/question_aware" --output "$out/vlm-drop.json"
.venv/bin/tokensieve bench --model_type vlm --model sieve-llava-8 --plan "$(plan question_aware)" --weights "$work/question_aware" \
  --batch_size 1 16 --new_tokens 3 --repeats 20 --break_even --output "$out/time_vlm.json"
