#!/bin/sh
# Fails if code for one instruction set could run on a processor without it.
#
#   scripts/check_isa_leak.sh [DIR]
#
# DIR holds the kernels' objects (any depth), e.g. a build folder; without it they are built in a temporary one.
#   - attention_<isa> objects define no weak symbol: the linker may take that copy for the whole program;
#   - they have no code that runs when the library is loaded;
#   - dispatch and scalar objects hold no AVX instruction, the avx2 object none of AVX-512.
set -eu

objdump=${OBJDUMP:-objdump}
nm=${NM:-nm}
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
  echo "check_isa_leak: $1" >&2
  failures=$((failures + 1))
}

# no_match FILE PATTERN TEXT: fails and shows the first matches.
no_match() {
  if grep -E -m 3 "$2" "$1" >"$work/found"; then
    fail "$3:"
    cat "$work/found" >&2
  fi
}

if [ $# -ge 1 ]; then
  dir=$1
else
  dir=$work/build
  cmake -S "$root" -B "$dir" -DFD_PYTHON=OFF >"$work/log" 2>&1 && cmake --build "$dir" --parallel >>"$work/log" 2>&1 || {
    cat "$work/log" >&2
    echo "check_isa_leak: the kernels do not build" >&2
    exit 1
  }
fi

for name in dispatch attention_scalar; do
  [ -n "$(find "$dir" -name "$name*.o")" ] || fail "no object of $name under $dir"
done

find "$dir" -name 'dispatch*.o' -o -name 'attention_*.o' | sort >"$work/objects"
while read -r object; do
  name=$(basename "$object")
  "$nm" "$object" >"$work/symbols"
  "$objdump" -d --no-show-raw-insn "$object" >"$work/code"
  "$objdump" -h "$object" >"$work/sections"
  case $name in attention_*)
    no_match "$work/symbols" ' [WwVvu] ' "$name has weak symbols"
    no_match "$work/sections" '\.(init_array|ctors)' "$name runs code when it is loaded"
    ;;
  esac
  case $name in
    dispatch*|attention_scalar*) no_match "$work/code" '^ *[0-9a-f]+:[[:space:]]+v[a-z]|%[yz]mm' "$name has AVX instructions" ;;
    attention_avx2*) no_match "$work/code" '%zmm|%k[1-7]|%[xy]mm(1[6-9]|2[0-9]|3[01])' "$name has AVX-512 instructions" ;;
  esac
done <"$work/objects"

[ "$failures" -eq 0 ] || exit 1
echo "check_isa_leak: $(wc -l <"$work/objects") objects are clean"
