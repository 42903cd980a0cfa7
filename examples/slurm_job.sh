#!/bin/bash
# sbatch examples/slurm_job.sh: 2 nodes of 8 GPUs, one task for each GPU
#SBATCH --job-name=gqsgd
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not read the job's own since SLURM 22.05
# If the doctor names a faster network than the one in use: export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

srun gqsgd doctor --nodes
srun python examples/lightning_nodes.py
