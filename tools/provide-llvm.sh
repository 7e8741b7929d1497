#!/usr/bin/env bash
# Provide the LLVM that the `cuda` and `cpu` features link, on a machine that cannot reach GitHub.
#
#   tools/provide-llvm.sh [TARBALL]
#
# Where GitHub can be reached this script is not needed: the build script of `tracel-llvm-bundler`
# fetches LLVM by itself. That build script first looks in a folder of the user's data directory;
# this script fills that folder from Debian's packages, through apt and the mirror that this machine
# already uses. Nothing is installed into the system.
#
# TARBALL  if the file exists it is unpacked and nothing is downloaded; if not, the finished folder
#          is written to it, for the next machine.
#
# Environment:
#   XDG_DATA_HOME  the user's data directory (default ~/.local/share); cargo must see the same value
#   DEBIAN_MIRROR  URL of a Debian mirror, for a machine whose own apt has none (Ubuntu)
#   CC, CXX        compilers (default gcc, g++)
#
# Needs apt, dpkg-deb, gcc, g++ and ar on x86-64 Linux; about 400 MB of disk while it runs and 190
# MB afterwards.
set -euo pipefail

# These two belong together: the release of tracel-llvm-bundler in Cargo.lock, and the LLVM it is
# built for.
bundle=23.1.0-4
llvm_major=23
llvm_release=23.1

# Code generators to keep: the host's for the CPU runtime and the JIT, NVIDIA's for CUDA.
targets='X86|NVPTX'

destination=${XDG_DATA_HOME:-$HOME/.local/share}/tracel/tracel-llvm-$bundle
# The bundler takes a folder for complete when this file is in it, and only then.
sentinel=$destination/.tracel-llvm-installed
staging=$destination.part
tarball=${1:-}

say() { printf 'provide-llvm: %s\n' "$*"; }
die() {
  say "$*" >&2
  exit 1
}

# Make the staged folder visible in one step, so that an interrupted run never leaves a half-filled
# one behind.
publish() {
  rm -rf "$destination"
  mv "$staging" "$destination"
  touch "$sentinel"
  say "ready: $destination"
}

# An apt of its own: three Debian suites, its own lists and cache, no installed packages.
configure_apt() {
  local keyring=/usr/share/keyrings/debian-archive-keyring.gpg trust mirror suite
  if [[ -f $keyring ]]; then
    trust=signed-by=$keyring
  else
    say "warning: no Debian keyring on this machine, package signatures are not checked" >&2
    trust=trusted=yes
  fi
  mirror=${DEBIAN_MIRROR:-}
  if [[ -z $mirror ]]; then
    # The format string is apt's own; the shell must not touch it.
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets \
      --format '$(REPO_URI) $(CODENAME) $(ORIGIN)' 'Created-By: Packages' |
      awk '$3 == "Debian" && $2 !~ /security/ && !found { print $1; found = 1 }')
  fi
  [[ -n $mirror ]] || die "apt knows no Debian mirror: set DEBIAN_MIRROR"

  mkdir -p "$work"/apt/lists/partial "$work"/apt/cache/archives/partial "$work"/packages
  touch "$work/apt/status"
  # LLVM comes from the newest suites; the two compression libraries from bookworm, whose glibc is
  # old enough for every host.
  for suite in sid forky bookworm; do
    printf 'deb [%s] %s %s main\n' "$trust" "$mirror" "$suite"
  done >"$work/apt/sources.list"
  apt_options=(
    -o "Dir::Etc::sourcelist=$work/apt/sources.list"
    -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::Lists=$work/apt/lists"
    -o "Dir::State::status=$work/apt/status"
    -o "Dir::Cache=$work/apt/cache"
    # The scratch folder is not readable by apt's sandbox user.
    -o "APT::Sandbox::User=$(id -un)"
    -o APT::Architecture=amd64
    -o APT::Architectures=amd64
    -o Acquire::Languages=none
    -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false
    -o Acquire::Retries=3
  )
  apt-get "${apt_options[@]}" -qq update
}

# fetch FOLDER PACKAGE...: download packages and unpack them into FOLDER.
fetch() {
  local folder=$1 package
  shift
  rm -f "$work"/packages/*.deb
  (cd "$work/packages" && apt-get "${apt_options[@]}" -qq download "$@")
  for package in "$work"/packages/*.deb; do
    dpkg-deb -x "$package" "$folder"
  done
}

# The headers, with `LLVMInitializeAll*` reduced to the targets that are kept.
stage_headers() {
  local list
  mkdir -p "$staging/include"
  cp -r "$work/llvm/usr/include/llvm-$llvm_major/llvm" \
    "$work/llvm/usr/include/llvm-c-$llvm_major/llvm-c" "$staging/include/"
  all_targets=$(sed -n 's/^LLVM_TARGET(\(.*\))$/\1/p' "$staging/include/llvm/Config/Targets.def")
  for list in Targets AsmParsers AsmPrinters Disassemblers; do
    sed -i -E "/^LLVM_[A-Z_]+\(/{/\(($targets)\)/!d}" "$staging/include/llvm/Config/$list.def"
  done
}

# The static libraries, without other targets and without those that only LLVM's own tools use.
stage_libraries() {
  local archive name target other_targets=
  for target in $all_targets; do
    [[ $target =~ ^($targets)$ ]] || other_targets+=${other_targets:+|}LLVM$target
  done
  local parts='AsmParser|CodeGen|Desc|Disassembler|Info|Utils|TargetMCA|Analysis'
  local tools='BOLT|Exegesis|Fuzz|LineEditor|HTTP|Debuginfod|CFIVerify|Dlltool|LibDriver'
  tools+='|FileCheck|TableGen|OptDriver'
  tools+='|Diff|XRay|SupportLSP|InterfaceStub|UBAware|DWP|Extensions'
  mkdir -p "$staging/lib"
  libraries=
  for archive in "$work/llvm/usr/lib/llvm-$llvm_major"/lib/libLLVM*.a; do
    name=$(basename "$archive" .a)
    name=${name#lib}
    [[ $name =~ ^($other_targets)($parts)$ || $name =~ ^LLVM($tools) ]] && continue
    cp "$archive" "$staging/lib/"
    strip -g "$staging/lib/lib$name.a" 2>/dev/null || true
    libraries+=" -l$name"
  done
  cp "$work"/compression/usr/lib/x86_64-linux-gnu/{libz.a,libzstd.a} "$staging/lib/"
  # Linked statically, so that a binary runs on a machine with an older libstdc++ than this one.
  cp "$("${CXX:-g++}" -print-file-name=libstdc++.a)" "$staging/lib/"
}

# Debian's objects are built against glibc 2.38 or newer and name its C23 variants of strtol and
# scanf. On an older glibc they are missing; these forward to the classic functions, and are weak
# where glibc has them.
stage_glibc_aliases() {
  cat >"$work/aliases.c" <<'C'
/* Without _GNU_SOURCE, the headers of every glibc bind the classic names. */
#undef _GNU_SOURCE
#define _DEFAULT_SOURCE 1
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#define WEAK __attribute__((weak))
WEAK long __isoc23_strtol(const char *s, char **end, int base) { return strtol(s, end, base); }
WEAK unsigned long __isoc23_strtoul(const char *s, char **end, int base) {
  return strtoul(s, end, base);
}
WEAK long long __isoc23_strtoll(const char *s, char **end, int base) {
  return strtoll(s, end, base);
}
WEAK unsigned long long __isoc23_strtoull(const char *s, char **end, int base) {
  return strtoull(s, end, base);
}
WEAK int __isoc23_sscanf(const char *s, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int result = vsscanf(s, format, arguments);
  va_end(arguments);
  return result;
}
WEAK int __isoc23_scanf(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int result = vscanf(format, arguments);
  va_end(arguments);
  return result;
}
C
  "${CC:-gcc}" -O2 -fPIC -std=gnu11 -c "$work/aliases.c" -o "$work/aliases.o"
  ar rcs "$staging/lib/libglibcaliases.a" "$work/aliases.o"
}

# The bundler asks llvm-config for everything. Debian's own answers with the paths and libraries of
# a system installation.
stage_llvm_config() {
  local version=$1 defines='-D__STDC_CONSTANT_MACROS -D__STDC_FORMAT_MACROS -D__STDC_LIMIT_MACROS'
  mkdir -p "$staging/bin"
  cat >"$staging/bin/llvm-config" <<SH
#!/bin/sh
prefix=\$(CDPATH='' cd -- "\$(dirname -- "\$0")/.." && pwd)
for option in "\$@"; do
  case \$option in
    --link-static) ;;
    --version) echo '$version' ;;
    --prefix) echo "\$prefix" ;;
    --bindir) echo "\$prefix/bin" ;;
    --libdir) echo "\$prefix/lib" ;;
    --includedir) echo "\$prefix/include" ;;
    --cflags | --cppflags) echo "-I\$prefix/include -D_GNU_SOURCE $defines" ;;
    --cxxflags)
      echo "-I\$prefix/include -std=c++17 -fno-exceptions -D_GNU_SOURCE" \
        "-D_GLIBCXX_USE_CXX11_ABI=1 $defines"
      ;;
    --libs | --libnames) echo '$libraries' ;;
    --system-libs) echo '-lz -lzstd -lglibcaliases -lrt -ldl -lm' ;;
    --shared-mode) echo static ;;
    *) echo "llvm-config: unknown option \$option" >&2; exit 1 ;;
  esac
done
SH
  chmod +x "$staging/bin/llvm-config"
}

# Compile a kernel to PTX and start the JIT with what was staged: a missing library shows here, in
# seconds, and not at the end of a long cargo build.
check() {
  cat >"$work/check.c" <<'C'
#include <llvm-c/Core.h>
#include <llvm-c/IRReader.h>
#include <llvm-c/LLJIT.h>
#include <llvm-c/Target.h>
#include <llvm-c/TargetMachine.h>
#include <llvm-c/Transforms/PassBuilder.h>
#include <stdio.h>
#include <string.h>
static const char kernel[] =
    "target triple = \"nvptx64-nvidia-cuda\"\n"
    "define ptx_kernel void @increment(ptr addrspace(1) %p) {\n"
    "  %old = load float, ptr addrspace(1) %p\n"
    "  %new = fadd float %old, 1.0\n"
    "  store float %new, ptr addrspace(1) %p\n"
    "  ret void\n"
    "}\n";
static int fail(const char *message) {
  fputs(message, stderr);
  return 1;
}
int main(void) {
  LLVMInitializeAllTargetInfos();
  LLVMInitializeAllTargets();
  LLVMInitializeAllTargetMCs();
  LLVMInitializeAllAsmPrinters();
  char *error = NULL;
  LLVMErrorRef failure;
  LLVMModuleRef module;
  LLVMTargetRef target;
  LLVMMemoryBufferRef ptx;
  LLVMOrcLLJITRef jit;
  LLVMMemoryBufferRef source =
      LLVMCreateMemoryBufferWithMemoryRangeCopy(kernel, strlen(kernel), "kernel");
  if (LLVMParseIRInContext(LLVMContextCreate(), source, &module, &error)) return fail(error);
  if (LLVMGetTargetFromTriple("nvptx64-nvidia-cuda", &target, &error)) return fail(error);
  LLVMTargetMachineRef machine = LLVMCreateTargetMachine(
      target, "nvptx64-nvidia-cuda", "sm_90", "+ptx80", LLVMCodeGenLevelAggressive,
      LLVMRelocDefault, LLVMCodeModelDefault);
  if ((failure = LLVMRunPasses(module, "default<O3>", machine, LLVMCreatePassBuilderOptions())))
    return fail(LLVMGetErrorMessage(failure));
  if (LLVMTargetMachineEmitToMemoryBuffer(machine, module, LLVMAssemblyFile, &error, &ptx)) {
    return fail(error);
  }
  if ((failure = LLVMOrcCreateLLJIT(&jit, NULL))) return fail(LLVMGetErrorMessage(failure));
  return strstr(LLVMGetBufferStart(ptx), "st.global") ? 0 : fail("no store in the PTX");
}
C
  local config=$staging/bin/llvm-config
  # The answers of llvm-config are lists of flags.
  # shellcheck disable=SC2046
  {
    "${CC:-gcc}" -c "$work/check.c" -I"$staging/include" -o "$work/check.o"
    "${CXX:-g++}" -o "$work/check" "$work/check.o" -L"$staging/lib" \
      -Wl,--start-group $("$config" --libs) -Wl,--end-group $("$config" --system-libs)
  }
  "$work/check" || die "the staged LLVM does not work"
  say "checked: PTX and JIT"
}

[[ $(uname -sm) == 'Linux x86_64' ]] || die "only for Linux on x86-64, this is $(uname -sm)"
if [[ -e $sentinel ]]; then
  say "already there: $destination"
  exit 0
fi
rm -rf "$staging"
mkdir -p "$staging"

if [[ -n $tarball && -f $tarball ]]; then
  tar -C "$staging" -xf "$tarball"
  publish
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work" "$staging"' EXIT
configure_apt
# The epoch `1:` is part of Debian's version; the revision after the dash is not LLVM's.
package_version=$(apt-cache "${apt_options[@]}" madison "llvm-$llvm_major-dev" |
  awk -v release="1:$llvm_release." 'index($3, release) == 1 && !found { print $3; found = 1 }')
[[ -n $package_version ]] || die "no suite carries llvm-$llvm_major-dev $llvm_release any more"
say "llvm-$llvm_major-dev $package_version"
fetch "$work/llvm" "llvm-$llvm_major-dev=$package_version"
fetch "$work/compression" libzstd-dev/bookworm zlib1g-dev/bookworm
stage_headers
stage_libraries
stage_glibc_aliases
version=${package_version#1:}
stage_llvm_config "${version%%-*}"
check
if [[ -n $tarball ]]; then
  tar -C "$staging" -cJf "$tarball" .
  say "written: $tarball"
fi
publish
