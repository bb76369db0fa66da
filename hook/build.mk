# SPDX-License-Identifier: Apache-2.0
#
# The hook's build: `make -f hook/build.mk [target]` from the root of the checkout.
#
#   all      libvgpu.so, libvgpu-strict.so, libaliquot-region.so
#   region   libaliquot-region.so only (what node daemons load)

CC ?= gcc
PY ?= python3
B := build/hook
MACHINE := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine)))

WARN := -Wall -Wextra -Werror -Wshadow -Wconversion -Wsign-conversion -Wstrict-prototypes -Wmissing-prototypes \
	-Wold-style-definition -Wundef -Wvla -Wformat=2 -Wcast-qual -Wcast-align -Wpointer-arith -Wwrite-strings \
	-Wswitch-enum -Wnull-dereference -Wduplicated-cond -Wduplicated-branches -Wlogical-op
CFLAGS ?= -O2 -g
BASE := -std=c11 -D_GNU_SOURCE -fPIC -fvisibility=hidden -fno-strict-aliasing -Ihook/include -Ihook/src $(WARN)
LINK := -shared -Wl,-z,relro,-z,now -Wl,--no-undefined -Wl,--as-needed

.PHONY: all region hook test-builds
all: region hook
region: $(B)/libaliquot-region.so
hook: $(B)/libvgpu.so $(B)/libvgpu-strict.so

HEADERS := $(wildcard hook/src/*.h hook/include/*.h)

REGION_SOURCES := $(wildcard hook/src/region_*.c) hook/src/account.c hook/src/guard.c
$(B)/libaliquot-region.so: $(REGION_SOURCES) $(HEADERS) hook/build.mk
	@mkdir -p $(@D)
	@echo "ld $@"
	@$(CC) $(BASE) $(CFLAGS) $(LINK) -Wl,-soname,libaliquot-region.so -o $@.tmp $(REGION_SOURCES) -pthread
	mv $@.tmp $@

# ---- generated -------------------------------------------------------------------------------------------

GEN := $(B)/gen
$(GEN)/stamp: build/symbols.json hook/symbols-class.txt $(wildcard hook/gen/*.py)
	$(PY) hook/gen build/symbols.json hook/symbols-class.txt $(GEN)
	touch $@

# ---- the hook --------------------------------------------------------------------------------------------
#
# One object per source and build; no start files (they bring constructors), nothing but libc, every name closed.

SOURCES := $(filter-out $(REGION_SOURCES),$(wildcard hook/src/*.c)) hook/src/account.c
HOOK_FLAGS := $(BASE) -I$(GEN) -fno-stack-protector -fno-asynchronous-unwind-tables -fno-unwind-tables -fno-exceptions \
	-ffunction-sections -fdata-sections -fno-tree-loop-distribute-patterns
# libgcc's choice between two kinds of atomics would be made in a constructor.
HOOK_FLAGS += $(if $(filter aarch64,$(MACHINE)),-mno-outline-atomics)
# Every process of a container loads this, so the loader's work counts: nothing is bound before it is called, two
# segments instead of four, no protection to be changed afterwards (a preload is no security boundary anyway).
HOOK_LINK := -shared -nostartfiles -Wl,--no-undefined -Wl,--as-needed -Wl,-z,lazy -Wl,-z,norelro \
	-Wl,-z,noseparate-code -Wl,-z,noexecstack -Wl,--sort-section=name -Wl,--gc-sections -Wl,-Bsymbolic -Wl,--hash-style=gnu \
	-Wl,--build-id -Wl,-soname,libvgpu.so -Wl,--version-script=$(GEN)/exports-$(MACHINE).map
OBJCOPY ?= objcopy

# What stands on a path that programs take often; the rest is built for size.
# On arm64, whose instructions are longer, nothing else stays within 100 KiB.
HOT := $(if $(filter aarch64,$(MACHINE)),,launch limiter limiter_bucket limiter_key lookup memory_linear nvml_memory place query resolve table)

# What a sanitizer itself calls while it starts; and with -nostartfiles its own start of the library is left out.
EARLY := entry lookup objects resolve sigbus

# $(call build,NAME,FOLDER,FLAGS,SANITIZER)
define build
$(2)_OBJECTS := $(patsubst hook/src/%.c,$(B)/obj/$(2)/%.o,$(SOURCES)) $(B)/obj/$(2)/entry.o $(B)/obj/$(2)/names.o \
	$(B)/obj/$(2)/wrappers.o
$(B)/obj/$(2)/%.o: hook/src/%.c $(HEADERS) $(GEN)/stamp hook/build.mk
	@mkdir -p $$(@D)
	@echo "cc $$< ($(2))"
	@$(CC) $(HOOK_FLAGS) $(CFLAGS) $$(if $$(filter $(HOT),$$*),,-Os) $(3) $$(if $$(filter $(EARLY),$$*),,$(4)) -c -o $$@.tmp $$<
	@mv $$@.tmp $$@ # whole or not at all, whoever is killed
$(B)/obj/$(2)/%.o: hook/src/%.S hook/build.mk
	@mkdir -p $$(@D)
	$(CC) -c -o $$@ $$<
$(B)/obj/$(2)/names.o: $(GEN)/stamp
	@mkdir -p $$(@D)
	$(CC) $(HOOK_FLAGS) $(CFLAGS) -c -o $$@ $(GEN)/names.c
$(B)/obj/$(2)/wrappers.o: $(GEN)/stamp
	@mkdir -p $$(@D)
	$(CC) -c -o $$@ $(GEN)/wrappers.S
$(1): $$($(2)_OBJECTS)
	@mkdir -p $$(@D)
	@echo "ld $$@"
	@$(CC) $(HOOK_LINK) $(4) -o $$@.tmp $$($(2)_OBJECTS)
	$(OBJCOPY) --only-keep-debug $$@.tmp $$@.debug
	$(OBJCOPY) --strip-unneeded --add-gnu-debuglink=$$@.debug $$@.tmp
	mv $$@.tmp $$@
endef

$(eval $(call build,$(B)/libvgpu.so,standalone,))
$(eval $(call build,$(B)/libvgpu-strict.so,strict,-DAQ_STRICT))
$(eval $(call build,$(B)/test/libvgpu.so,test-standalone,-DAQ_ROOT_PATCHABLE))
$(eval $(call build,$(B)/test/libvgpu-strict.so,test-strict,-DAQ_STRICT -DAQ_ROOT_PATCHABLE))

# The same two with a root that a test can write into a copy of the file.
test-builds: $(B)/test/libvgpu.so $(B)/test/libvgpu-strict.so

# The strict one under sanitizers; their library has to be preloaded before it.
SANITIZED := -DAQ_STRICT -DAQ_ROOT_PATCHABLE -O1 -fno-omit-frame-pointer
$(eval $(call build,$(B)/test/asan/libvgpu-strict.so,test-asan,$(SANITIZED),-fsanitize=address -fsanitize=undefined))
$(eval $(call build,$(B)/test/tsan/libvgpu-strict.so,test-tsan,$(SANITIZED),-fsanitize=thread))
.PHONY: sanitized-builds
sanitized-builds: $(B)/test/asan/libvgpu-strict.so $(B)/test/tsan/libvgpu-strict.so

# For arm64, by a cross compiler.
.PHONY: arm64
arm64:
	$(MAKE) --no-print-directory -f hook/build.mk B=build/hook-arm64 CC=aarch64-linux-gnu-gcc OBJCOPY=aarch64-linux-gnu-objcopy \
		build/hook-arm64/libvgpu.so build/hook-arm64/libvgpu-strict.so build/hook-arm64/libaliquot-region.so \
		build/hook-arm64/test/libvgpu-strict.so
