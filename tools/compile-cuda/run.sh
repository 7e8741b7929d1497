#!/usr/bin/env bash
# Compile the operators' CUDA kernels as on given GPUs, on a machine without one.
#
#   tools/compile-cuda/run.sh [FILTER...]
#
# Every case of the operators' benchmark whose name contains a FILTER (default: all) is launched
# once for each architecture of the table below, or of those in ARCHITECTURES ("80 90"), with a CUDA
# driver that only keeps the PTX (fake_cuda.c). NVRTC compiles the kernels, ptxas assembles them. A
# kernel that one of them refuses, or whose launch the GPU would refuse, is an error. At the end is
# a table: for each kernel and architecture `variants: registers, static shared memory, spills`, the
# most of any variant.
#
# NVRTC, ptxas and their headers come from PyPI. Needs python3 with pip, cc, and the LLVM that the
# feature `cuda` links (tools/provide-llvm.sh, where the build script cannot fetch it).
#
# PROGRAM is a benchmark binary that is there already, PROFILE the one to build it in otherwise, and
# KEEP a new folder for the PTX. `diff -r` of those of two versions says which kernels differ. With
# SOURCES=1, KEEP gets the CUDA C++ in place of PTX, by fake_nvrtc.c: nothing is compiled or
# fetched, and there is no table. The same source gives the same PTX.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/burn-ds4-cuda

# Compute capability, bytes of shared memory of a block, multiprocessors, and a GPU that has them.
gpus='
75 65536 40 T4
80 166912 108 A100
86 101376 82 RTX 3090
89 101376 128 RTX 4090
90 232448 132 H200
100 232448 148 B200
120 101376 170 RTX 5090
'
wanted=" ${ARCHITECTURES:-75 80 86 89 90 100 120} "

[[ -n ${SOURCES:-} ]] || "$here/provide.sh" "$cache"
[[ -z ${SOURCES:-} || -n ${KEEP:-} ]] || {
  echo 'SOURCES needs KEEP, a new folder for the sources' >&2
  exit 2
}
mkdir -p "$cache/driver" "$cache/sources"
# Only where it is older, since other runs may have it loaded.
library() {
  [[ $1 -nt $2 ]] || cc -shared -fPIC -O1 -o "$1" "$2"
}
library "$cache/driver/libcuda.so.1" "$here/fake_cuda.c"
ln -sf libcuda.so.1 "$cache/driver/libcuda.so"
nvrtc=$cache/nvidia/cu13/lib
if [[ -n ${SOURCES:-} ]]; then
  nvrtc=$cache/sources
  library "$nvrtc/libnvrtc.so" "$here/fake_nvrtc.c"
fi

cd "$here/../.."
program=${PROGRAM:-}
if [[ -z $program ]]; then
  build=(cargo bench --profile "${PROFILE:-bench}" -p burn-ds4-ops --features cuda --bench ops
    --no-run)
  "${build[@]}"
  program=$("${build[@]}" --message-format json |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
fi

if [[ -n ${KEEP:-} ]]; then
  out=$KEEP
  mkdir "$out"
else
  out=$(mktemp -d)
  trap 'rm -r "$out"' EXIT
fi
folders=()
while read -r sm shared sms name; do
  [[ -n $sm && $wanted == *" $sm "* ]] || continue
  folder="$out/sm_$sm"
  mkdir "$folder"
  folders+=("$folder")
  printf '== sm_%s, as on %s\n' "$sm" "$name"
  env LD_LIBRARY_PATH="$cache/driver:$nvrtc" CUDA_PATH="$cache/nvidia/cu13" \
    FAKE_CUDA_SM="$sm" FAKE_CUDA_SHARED="$shared" FAKE_CUDA_SMS="$sms" FAKE_CUDA_PTX="$folder" \
    FAKE_CUDA_LAUNCHES="$folder/launches" \
    "$program" launch --device cuda "$@" >"$out/log" || {
    cat "$out/log"
    exit 1
  }
done <<<"$gpus"
[[ -n ${SOURCES:-} ]] || python3 "$here/report.py" "$cache/nvidia/cu13/bin/ptxas" "${folders[@]}"
