#!/usr/bin/env bash
# Runs Ferry's GPU tests: run-gpu-tests.sh [N] [--ranks R] [--only SUITE]... [--list] [--sanitize]
# N GPUs (default: all of this machine), a rank each; with --ranks R, R ranks share the first N.
# Needs: the NVIDIA driver, Open MPI, and NVSHMEM 3.4.5 (in LD_LIBRARY_PATH or python3's packages). If ranks share
# GPUs, NVSHMEM needs an MPS daemon: each such suite starts and ends one.
# --only: only this suite; may be given several times. --list: only print the suites' names.
# --sanitize: on one GPU, under the tools of compute-sanitizer; needs the driver and that program.
set -euo pipefail

usage() {
    echo "usage: run-gpu-tests.sh [N] [--ranks R] [--only SUITE]... [--list] [--sanitize]," \
        "N being how many GPUs to use, and R how many ranks share them; got '$arguments'" >&2
    exit 2
}
is_count() { [[ "$1" =~ ^[1-9][0-9]*$ ]]; }

arguments=$*
gpus= ranks= sanitize= list=
only=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --sanitize) sanitize=yes ;;
        --list) list=yes ;;
        --ranks) ranks=${2:-none}; is_count "$ranks" || usage; shift ;;
        --only) [[ -n "${2:-}" ]] || usage; only+=("$2"); shift ;;
        *) is_count "$1" && [[ -z "$gpus" ]] || usage; gpus=$1 ;;
    esac
    shift
done
gpus=${gpus:-$(nvidia-smi --list-gpus | wc -l)}
if [[ -n "$sanitize" && "$gpus" -ne 1 ]]; then
    echo "run-gpu-tests.sh $gpus --sanitize: the tools do not work with kernels that wait for other GPUs; give 1" >&2
    exit 2
fi
cd "$(dirname "$0")"
# NVLink multicast is off: some machines have it but do not let a process use it.
export NVSHMEM_DISABLE_NVLS=1 NCCL_NVLS_ENABLE=0
# The program's commit.
commit=$(cat commit 2> /dev/null || echo unknown)

passed=0 failed=0 skipped=0
names=()
only_names=yes
# wanted NAME: whether to run this suite. The first pass over all suites only records their names.
wanted() {
    if [[ -n "$only_names" ]]; then
        names+=("$1")
        return 1
    fi
    local name
    for name in "${only[@]}"; do
        if [[ "$name" == "$1" ]]; then return 0; fi
    done
    [[ ${#only[@]} -eq 0 ]]
}
run() {
    local name=$1
    shift
    echo "== $name, commit $commit"
    echo "+ $*"
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}
# suite NAME COMMAND...
suite() {
    if wanted "$1"; then run "$@"; fi
}

# If ranks share GPUs, every suite sees the first N visible GPUs, and no MPS daemon but its own.
numbers= visible= nothing=
set_apart() {
    numbers=$(seq -s, 0 $((gpus - 1)))
    visible=$(cut -d, -f"1-$gpus" <<< "${CUDA_VISIBLE_DEVICES-$numbers}")
    nothing=$(mktemp -d)
    export CUDA_VISIBLE_DEVICES=$visible CUDA_MPS_PIPE_DIRECTORY=$nothing
}

# The folder of the running MPS daemon, if there is one.
mps=
start_mps() {
    mps=$(mktemp -d)
    mkdir "$mps/pipe" "$mps/log"
    export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe
    CUDA_MPS_LOG_DIRECTORY=$mps/log nvidia-cuda-mps-control -d || return
    # The daemon numbers its visible GPUs from 0.
    CUDA_VISIBLE_DEVICES=$numbers
}
stop_mps() {
    if [[ -z "$mps" ]]; then return; fi
    local daemon
    daemon=$(cat "$mps/pipe/nvidia-cuda-mps-control.pid" 2> /dev/null || true)
    if ! timeout 30 nvidia-cuda-mps-control > /dev/null <<< "quit -t 10" && [[ -n "$daemon" ]]; then
        # The daemon and its servers, which are no one else's.
        kill -9 $(pgrep -P "$daemon") "$daemon" || true
    fi
    CUDA_MPS_PIPE_DIRECTORY=$nothing CUDA_VISIBLE_DEVICES=$visible
    rm -rf "$mps"
    mps=
}
trap 'stop_mps; rm -rf "$nothing"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
# suite_with_mps NAME COMMAND...
suite_with_mps() {
    if ! wanted "$1"; then return; fi
    if ! command -v nvidia-cuda-mps-control > /dev/null; then
        echo "== $1, commit $commit"
        echo "skip $1: nvidia-cuda-mps-control is missing, which NVSHMEM needs if processes share a GPU"
        skipped=$((skipped + 1))
    elif start_mps; then
        run "$@"
        stop_mps
    else
        echo "FAIL $1: nvidia-cuda-mps-control -d does not start"
        failed=$((failed + 1))
        stop_mps
    fi
}

find_nvshmem() {
    local library=libnvshmem_host.so.3 found='' folders folder
    IFS=: read -ra folders <<< "${LD_LIBRARY_PATH:-}"
    for folder in "${folders[@]}"; do
        if [[ -e "$folder/$library" ]]; then found=$folder; fi
    done
    if [[ -n "$found" ]]; then return; fi
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
}

mpi() { echo "mpirun --allow-run-as-root --oversubscribe -n $1 ./ferry-tests"; }

# A rank a GPU.
suites() {
    local mpi
    mpi=$(mpi "$gpus")
    suite local ./ferry-tests gpu --require-gpus "$gpus"
    suite node $mpi gpu --group node --require-gpus "$gpus"
    suite nvshmem $mpi gpu --group nvshmem --require-gpus "$gpus"
    if [[ "$gpus" -gt 1 ]]; then
        suite killed-node ./ferry-tests killed --group node --require-gpus "$gpus"
        suite killed-nvshmem ./ferry-tests killed --require-gpus "$gpus"
    fi
}

# Ranks that share GPUs. Processes of a node group take turns without MPS.
suites_of_shared_gpus() {
    local shared mpi size smaller=() skips=() killed
    shared="--share-gpus --ranks $ranks --require-gpus $gpus"
    mpi=$(mpi "$ranks")
    killed="--deadline-ms 2000 $shared"
    for size in 4 2 1; do
        if [[ "$size" -lt "$ranks" && $((ranks % size)) -eq 0 ]]; then
            smaller+=("$size")
            skips+=(--skip ", $size a node")
        fi
    done
    suite local ./ferry-tests gpu $shared
    suite_with_mps "nvshmem-$ranks" $mpi gpu --group nvshmem $shared "${skips[@]}"
    for size in "${smaller[@]}"; do
        suite_with_mps "nvshmem-$size" $mpi gpu --group nvshmem $shared --quick --filter ", $size a node"
    done
    suite node $mpi gpu --group node $shared --quick
    suite demo ./ferry-tests demo --share-gpus --ranks "$ranks"
    if [[ "$ranks" -gt 1 ]]; then
        suite killed-node ./ferry-tests killed --group node $killed
        suite_with_mps killed-node-mps ./ferry-tests killed --group node $killed
        suite_with_mps killed-nvshmem ./ferry-tests killed $killed
    fi
}

suites_of_sanitizer() {
    if [[ -z "$ranks" ]]; then
        suite sanitize ./ferry-tests sanitize
        return
    fi
    local shared="--share-gpus --ranks $ranks"
    suite memcheck ./ferry-tests sanitize --tool memcheck --seconds 500 $shared
    suite racecheck ./ferry-tests sanitize --tool racecheck --seconds 120 $shared
}

all=suites
if [[ -n "$ranks" ]]; then all=suites_of_shared_gpus; fi
if [[ -n "$sanitize" ]]; then all=suites_of_sanitizer; fi
$all
only_names=
if [[ -n "$list" ]]; then
    printf '%s\n' "${names[@]}"
    exit
fi
for name in "${only[@]}"; do
    if [[ " ${names[*]} " != *" $name "* ]]; then
        echo "run-gpu-tests.sh: there is no suite $name; there are: ${names[*]}" >&2
        exit 2
    fi
done
chosen="${only[*]:-${names[*]}}"
if [[ "$chosen" == *nvshmem* ]]; then find_nvshmem; fi
if [[ -n "$ranks" ]]; then set_apart; fi
$all
echo "ferry: $passed passed, $failed failed, $skipped skipped"
[[ "$failed" -eq 0 ]]
