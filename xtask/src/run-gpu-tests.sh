#!/usr/bin/env bash
# Runs Ferry's GPU tests: run-gpu-tests.sh [N] [--sanitize]   (default: every GPU of this machine)
# Needs: the NVIDIA driver, Open MPI, and NVSHMEM 3.4.5 (in LD_LIBRARY_PATH or python3's packages).
# With --sanitize: on one GPU, under the tools of compute-sanitizer; needs the driver and that program.
set -euo pipefail

sanitize=
if [[ "${*: -1}" == --sanitize ]]; then
    sanitize=yes
    set -- "${@:1:$#-1}"
fi
gpus="${1:-$(nvidia-smi --list-gpus | wc -l)}"
if ! [[ "$gpus" =~ ^[1-9][0-9]*$ && $# -le 1 ]]; then
    echo "usage: run-gpu-tests.sh [N] [--sanitize], N being how many GPUs to use; got '$*'" >&2
    exit 2
fi
if [[ -n "$sanitize" && "$gpus" -ne 1 ]]; then
    echo "run-gpu-tests.sh $gpus --sanitize: kernels that wait for other GPUs' make no use of the tools; give 1" >&2
    exit 2
fi
cd "$(dirname "$0")"
# NVLink multicast is off: not every machine that has it lets a process use it.
export NVSHMEM_DISABLE_NVLS=1 NCCL_NVLS_ENABLE=0

passed=0
failed=0
run() {
    echo "+ $*"
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}
count() {
    echo "ferry: $passed passed, $failed failed"
    [[ "$failed" -eq 0 ]]
}
if [[ -n "$sanitize" ]]; then
    run ./ferry-tests sanitize
    count
    exit
fi

library=libnvshmem_host.so.3
found=
IFS=: read -ra folders <<< "${LD_LIBRARY_PATH:-}"
for folder in "${folders[@]}"; do
    if [[ -e "$folder/$library" ]]; then found=$folder; fi
done
if [[ -z "$found" ]]; then
    found=$(python3 - "$library" <<'PYTHON' || true
import os, sys
folders = (os.path.join(path, "nvidia", "nvshmem", "lib") for path in sys.path)
print(next((f for f in folders if os.path.exists(os.path.join(f, sys.argv[1]))), ""))
PYTHON
    )
    if [[ -z "$found" ]]; then
        echo "$library is missing; get it with: python3 -m pip install nvidia-nvshmem-cu13==3.4.5" >&2
        exit 1
    fi
    export LD_LIBRARY_PATH="$found${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

run ./ferry-tests gpu --require-gpus "$gpus"
run mpirun --allow-run-as-root -n "$gpus" ./ferry-tests gpu --group node --require-gpus "$gpus"
run mpirun --allow-run-as-root -n "$gpus" ./ferry-tests gpu --group nvshmem --require-gpus "$gpus"
if [[ "$gpus" -gt 1 ]]; then
    run ./ferry-tests killed --group node --require-gpus "$gpus"
    run ./ferry-tests killed --require-gpus "$gpus"
fi
count
