#!/usr/bin/env bash
# Fill a folder with NVRTC, ptxas and their headers from PyPI, unless it has them.
#
#   tools/compile-cuda/provide.sh FOLDER
set -euo pipefail
folder=$1
version=13.0

if [[ ! -x $folder/nvidia/cu13/bin/ptxas ]]; then
  mkdir -p "$folder/wheels"
  python3 -m pip download --quiet --no-deps --dest "$folder/wheels" \
    "nvidia-cuda-nvrtc==$version.*" "nvidia-cuda-nvcc==$version.*" \
    "nvidia-cuda-runtime==$version.*" "nvidia-cuda-cccl==$version.*"
  for wheel in "$folder"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$folder"
  done
  chmod +x "$folder"/nvidia/cu13/bin/*
  ln -sf libnvrtc.so.13 "$folder/nvidia/cu13/lib/libnvrtc.so"
fi
