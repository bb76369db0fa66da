#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The hook on a machine with a real GPU, in about five minutes: `hook/tests/gpu.sh [PYTHON]`. PYTHON is an interpreter
# with PyTorch for CUDA, and JAX where it is wanted; without them only the driver's own interface is tried.
# Needs `make hook`, and root or a user namespace to mount the grant. Prints one line a check, ends non-zero when one
# is wrong, and with 77 when there is no GPU. Nothing runs longer than a minute.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
python=${1:-python3}
library=$here/build/hook/libvgpu-strict.so
region=$here/build/hook/libaliquot-region.so
failed=0

uuid=$(nvidia-smi --query-gpu=uuid --format=csv,noheader -i 0 2>/dev/null) || uuid=
[ -n "$uuid" ] || { echo "no GPU here: nothing was tried"; exit 77; }
[ -e "$library" ] || { echo "build it first: make hook"; exit 2; }
work=$(mktemp -d)
made=
[ -d /usr/local/vgpu ] || { mkdir /usr/local/vgpu && made=/usr/local/vgpu; }
trap 'rm -rf "$work"; [ -z "$made" ] || rmdir "$made"' EXIT
mkdir -p "$work/grants" "$work/usage/gpu"

# A grant of `$1` MiB and `$2` percent of the first card.
grant() {
	rm -f "$work/grants/gpu" "$work/usage/gpu/region"
	"$python" - "$region" "$work" "$uuid" "$1" "$2" <<'PY'
import ctypes, struct, sys
library, work, uuid, mib, cores = sys.argv[1:]
lib = ctypes.CDLL(library)
slot = bytearray(1024)
struct.pack_into("<4Q4I", slot, 0, 0, int(mib) << 20, 0, 0, int(cores), 1, 0, 0)
slot[48:48 + len(uuid)] = uuid.encode()
slot[176:179] = b"gpu"
assert lib.aq_grant_create(f"{work}/grants/gpu".encode(), bytes(slot)) == 0
assert lib.aq_usage_create(f"{work}/usage/gpu/region".encode()) == 0
PY
}

# Runs a command with the grant where a container has it and the hook in front.
confined() {
	# shellcheck disable=SC2016  # the inner shell expands these
	unshare --mount --map-root-user sh -c \
		'mount --bind "$1" /usr/local/vgpu && library=$2 && shift 2 && LD_PRELOAD=$library exec "$@"' \
		sh "$work" "$library" timeout -k 5 60 "$@"
}

# $1 what, $2 expected, rest: a command that prints one line.
check() {
	what=$1 expected=$2
	shift 2
	got=$(confined "$@" 2>"$work/err" | tail -n 1) || true
	if [ "$got" = "$expected" ]; then
		echo "ok    $what"
	else
		echo "WRONG $what: got '$got', expected '$expected'"
		sed 's/^/      /' "$work/err" | tail -n 5
		failed=1
	fi
}

grant 4096 0
driver='
import ctypes as c
cuda = c.CDLL("libcuda.so.1")
def call(n, *a): return getattr(cuda, n)(*a)
assert call("cuInit", 0) == 0
x = c.c_void_p(); assert call("cuCtxCreate_v2", c.byref(x), 0, 0) == 0
def alloc(n):
    p = c.c_uint64(); return call("cuMemAlloc_v2", c.byref(p), c.c_size_t(n)), p.value
f, t = c.c_size_t(), c.c_size_t()
'
check "total is the limit" "4294967296" "$python" -c "$driver
call('cuMemGetInfo_v2', c.byref(f), c.byref(t)); print(t.value)"
check "all of it and not more" "0 2 0" "$python" -c "$driver
a = alloc(4 << 30); b = alloc(1); call('cuMemFree_v2', c.c_uint64(a[1])); print(a[0], b[0], alloc(1 << 30)[0])"
check "stream-ordered memory" "0 2" "$python" -c "$driver
def a(n):
    p = c.c_uint64(); return call('cuMemAllocAsync', c.byref(p), c.c_size_t(n), None)
print(a(3 << 30), a(2 << 30))"
check "an address that is none is the driver's to judge" "1" "$python" -c "$driver
print(call('cuMemFree_v2', c.c_uint64(4096 + 1)))"
check "handles and maps: counted once, kept until unmapped" "0 2 0" "$python" -c "$driver
class L(c.Structure): _fields_ = [('type', c.c_int), ('id', c.c_int)]
class P(c.Structure):
    _fields_ = [('type', c.c_int), ('h', c.c_int), ('at', L), ('w', c.c_void_p), ('f', c.c_ubyte * 8)]
def create(n):
    h = c.c_uint64(); return call('cuMemCreate', c.byref(h), c.c_size_t(n), c.byref(P(1, 0, L(1, 0))), c.c_ulonglong(0)), h
n = 3 << 30; a, h = create(n); at = c.c_uint64()
call('cuMemAddressReserve', c.byref(at), c.c_size_t(n), c.c_size_t(0), c.c_uint64(0), c.c_ulonglong(0))
call('cuMemMap', at, c.c_size_t(n), c.c_size_t(0), h, c.c_ulonglong(0)); call('cuMemRelease', h); b = create(n)[0]
call('cuMemUnmap', at, c.c_size_t(n)); print(a, b, create(n)[0])"
check "the process list is our own" "True" "$python" -c "$driver
import os, subprocess
alloc(64 << 20)
out = subprocess.run(['nvidia-smi', '--query-compute-apps=pid', '--format=csv,noheader', '-i', '0'], capture_output=True)
print(out.stdout.decode().split() == [str(os.getpid())])"
check "what a killed process held comes back" "0" "$python" -c "import subprocess, sys
held = '''$driver
alloc(3 << 30); print(1, flush=True); input()
'''
p = subprocess.Popen([sys.executable, '-c', held], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
p.stdout.readline(); p.kill(); p.wait()
$driver
print(alloc(3 << 30)[0])"
check "nvidia-smi shows the share" "4096" nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0

if "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
	torch='
import torch
def fill():
    held = []
    try:
        while True: held.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError: return len(held)
'
	for allocator in "" "backend:cudaMallocAsync" "expandable_segments:True"; do
		check "PyTorch ${allocator:-native}" "True True" env PYTORCH_CUDA_ALLOC_CONF="$allocator" "$python" -c "$torch
n = fill(); torch.cuda.empty_cache(); print(8 <= n <= 16, fill() >= n - 1)"
	done
	check "PyTorch, a graph" "True" "$python" -c "$torch
x = torch.ones(1 << 20, device='cuda'); g = torch.cuda.CUDAGraph(); s = torch.cuda.Stream()
with torch.cuda.stream(s): y = x * 2
torch.cuda.synchronize()
with torch.cuda.graph(g): z = x * 3
g.replay(); torch.cuda.synchronize(); print(bool((z == 3).all()))"
	speed="$torch
import time
a = torch.randn(2048, 2048, device='cuda'); torch.cuda.synchronize(); n, end = 0, time.time() + 15
while time.time() < end:
    for _ in range(50): a @ a
    torch.cuda.synchronize(); n += 50
print(n)"
	whole=$(confined "$python" -c "$speed" 2>/dev/null | tail -n 1)
	grant 4096 30
	part=$(confined "$python" -c "$speed" 2>/dev/null | tail -n 1)
	share=$((${part:-0} * 100 / ${whole:-1}))
	if [ "$share" -ge 26 ] && [ "$share" -le 34 ]; then
		echo "ok    work at 30 %: $share % of what the card does alone"
	else
		echo "WRONG work at 30 %: $share % of what the card does alone"
		failed=1
	fi
else
	echo "--    no PyTorch with CUDA in $python: frameworks were not tried"
fi

if "$python" -c 'import jax; assert jax.devices()[0].platform == "gpu"' 2>/dev/null; then
	grant 4096 0
	check "JAX plans with the share" "True" "$python" -c "import jax
jax.numpy.ones(1024).block_until_ready()
print(2 << 30 <= jax.devices()[0].memory_stats()['bytes_limit'] <= 4 << 30)"
else
	echo "--    no JAX with CUDA in $python"
fi

if command -v nvidia-cuda-mps-control >/dev/null 2>&1; then
	grant 4096 0
	CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work nvidia-cuda-mps-control -d >/dev/null 2>&1 </dev/null || true
	check "as a client of MPS" "0 2" env CUDA_MPS_PIPE_DIRECTORY="$work/mps" "$python" -c "$driver
print(alloc(3 << 30)[0], alloc(2 << 30)[0])"
	echo quit | CUDA_MPS_PIPE_DIRECTORY=$work/mps nvidia-cuda-mps-control >/dev/null 2>&1 || true
fi
exit $failed
