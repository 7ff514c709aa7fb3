#!/usr/bin/env bash
# Ray on every node of a Slurm job, and a command beside its head:
#
#   sbatch --nodes=2 docker/slurm.sh python train_ray.py --config esm2ae --run.storage_path /shared/runs
#
# From the repository's folder, which every node sees, with .venv activated. The job's exit code is the command's.
#SBATCH --job-name=esmeray
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
# Two minutes before the time limit the command gets SIGTERM, and saves a checkpoint.
#SBATCH --signal=B:TERM@120
set -euo pipefail

port=${RAY_PORT:-6379}
# A token of this job alone, which srun hands on in the environment: it is in no file and no command line.
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# This script runs on the first node. A name could stand for 127.0.1.1 there.
head=$(python -c "import ray; print(ray.util.get_node_ip_address())")
export RAY_ADDRESS=$head:$port

# Not `ray symmetric-run` (2.60): it exits with 0 if Ray did not start, passes on no SIGTERM, and its `ray stop` ends
# every Ray of the user on the machine.
# srun gives a task one core unless it is asked for all.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1 bash -c '
    if [ "$SLURM_NODEID" = 0 ]; then
        role=(--head --node-ip-address="${RAY_ADDRESS%:*}" --port="${RAY_ADDRESS##*:}" --dashboard-host=127.0.0.1)
    else
        role=(--address="$RAY_ADDRESS")
    fi
    exec ray start --block --num-cpus="$SLURM_CPUS_ON_NODE" "${role[@]}"' > "ray-$SLURM_JOB_ID.log" 2>&1 &
ray=$!
trap 'kill $ray 2>/dev/null; wait $ray || true' EXIT

timeout 300 python - "$SLURM_JOB_NUM_NODES" <<'END'
import sys, time, ray
ray.init(log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(1)
END

"$@" &
command=$!
trap 'kill -TERM $command' TERM
status=0
wait $command || status=$?
if kill -0 $command 2>/dev/null; then  # a signal ended the first wait
    status=0
    wait $command || status=$?
fi
exit $status
