# SPDX-License-Identifier: Apache-2.0
#
# The hook's build: `make -f hook/build.mk [target]` from the root of the checkout.
#
#   all      libvgpu.so, libvgpu-strict.so, libaliquot-region.so
#   region   libaliquot-region.so only (what node daemons load)

CC ?= gcc
PY ?= python3
B := build/hook

WARN := -Wall -Wextra -Werror -Wshadow -Wconversion -Wsign-conversion -Wstrict-prototypes -Wmissing-prototypes \
	-Wold-style-definition -Wundef -Wvla -Wformat=2 -Wcast-qual -Wcast-align -Wpointer-arith -Wwrite-strings \
	-Wswitch-enum -Wnull-dereference -Wduplicated-cond -Wduplicated-branches -Wlogical-op
CFLAGS ?= -O2 -g
BASE := -std=c11 -D_GNU_SOURCE -fPIC -fvisibility=hidden -fno-strict-aliasing -Ihook/include -Ihook/src $(WARN)
LINK := -shared -Wl,-z,relro,-z,now -Wl,--no-undefined -Wl,--as-needed

.PHONY: all region
all: region
region: $(B)/libaliquot-region.so

REGION_SOURCES := hook/src/region_node.c hook/src/account.c hook/src/guard.c
$(B)/libaliquot-region.so: $(REGION_SOURCES) $(wildcard hook/src/*.h hook/include/*.h) hook/build.mk
	@mkdir -p $(@D)
	$(CC) $(BASE) $(CFLAGS) $(LINK) -Wl,-soname,libaliquot-region.so -o $@.tmp $(REGION_SOURCES) -pthread
	mv $@.tmp $@
