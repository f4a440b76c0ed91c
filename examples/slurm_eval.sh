#!/usr/bin/env bash
# Evaluates plans on several machines of a SLURM cluster: torchrun on every node, as many processes there as it has GPUs.
#
#   sbatch --nodes 4 examples/slurm_eval.sh --model ViT-L-14 --pretrained openai --dataset imagenet1k --dataset_root /data/imagenet \
#     --plan 2x --compare none --output 'results/{plan}.json'
#
# The words behind the name of this script are flags of `tokensieve eval`. Data, weights and the folder of results are on a disk
# that all nodes share. The result is that of a single process.
#SBATCH --job-name=tokensieve-eval
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail

# PROCESSES (a node) if it is given, else the GPUs of a node, else one process with all of its processors.
processes=${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_node=${nodes%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-1} / processes > 0 ? ${SLURM_CPUS_PER_TASK:-1} / processes : 1))}

echo "$SLURM_JOB_NUM_NODES nodes, $processes processes each, $OMP_NUM_THREADS threads a process; $first_node:$port"
srun --ntasks-per-node=1 torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc_per_node "$processes" \
  --rdzv_backend c10d \
  --rdzv_id "$SLURM_JOB_ID" \
  --rdzv_endpoint "$first_node:$port" \
  -m tokensieve eval "$@"
