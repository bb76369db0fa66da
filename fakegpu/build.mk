# SPDX-License-Identifier: Apache-2.0
#
# The fake driver. `make headers` reads the names of the driver, `make fakegpu` builds the driver roots:
# build/fakegpu (every name there is) and build/fakegpu-{550,525,470} (what a driver of that age had).
# Included by the Makefile at the root; works alone too: make -f fakegpu/build.mk fakegpu

BUILD ?= build
CC ?= gcc
# An interpreter with nothing but the standard library and pip is enough.
PY ?= $(firstword $(wildcard .venv/bin/python) python3)

FAKEGPU_OBJ := $(BUILD)/fakegpu-obj
FAKEGPU_GEN := $(FAKEGPU_OBJ)/gen
FAKEGPU_FLAVOURS := 580 550 525 470
FAKEGPU_WARNINGS := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
	-Wwrite-strings -Wundef -Wvla -Wformat=2 -Wno-format-nonliteral -Wimplicit-fallthrough -Wunused-macros
FAKEGPU_CFLAGS := -std=c11 -D_GNU_SOURCE -O2 -g -fPIC -fvisibility=hidden -fno-common -ffunction-sections \
	-fno-strict-aliasing $(FAKEGPU_WARNINGS) -Ifakegpu/src -isystem $(BUILD)/headers/13 -MMD -MP
# Export what the version script says and nothing else. -Bsymbolic: the driver's own references, and what
# cuGetProcAddress hands out, are the driver's functions, whatever a preloaded library exports under their names.
FAKEGPU_LDFLAGS := -shared -Wl,-Bsymbolic -Wl,--no-undefined -Wl,--gc-sections -Wl,-z,relro -Wl,-z,now -Wl,--build-id

FAKEGPU_CUDA_SRC := $(wildcard fakegpu/src/cuda_*.c)
FAKEGPU_NVML_SRC := $(wildcard fakegpu/src/nvml_*.c)
FAKEGPU_SMI_SRC := $(wildcard fakegpu/src/smi*.c)
FAKEGPU_MPS_SRC := $(wildcard fakegpu/src/mps_*.c)
FAKEGPU_SHARED_SRC := $(filter-out $(FAKEGPU_CUDA_SRC) $(FAKEGPU_NVML_SRC) $(FAKEGPU_SMI_SRC) $(FAKEGPU_MPS_SRC), \
	$(wildcard fakegpu/src/*.c))
fakegpu_objects = $(patsubst fakegpu/src/%.c,$(FAKEGPU_OBJ)/%.o,$(1))
FAKEGPU_CUDA_OBJ := $(call fakegpu_objects,$(FAKEGPU_CUDA_SRC) $(FAKEGPU_SHARED_SRC))
FAKEGPU_NVML_OBJ := $(call fakegpu_objects,$(FAKEGPU_NVML_SRC) $(FAKEGPU_SHARED_SRC))
FAKEGPU_SMI_OBJ := $(call fakegpu_objects,$(FAKEGPU_SMI_SRC))
FAKEGPU_MPS_OBJ := $(call fakegpu_objects,$(FAKEGPU_MPS_SRC))

.PHONY: headers fakegpu
headers: $(BUILD)/symbols.json

HOOK_SYMBOLS_SRC := $(wildcard hook/symbols/*.py) hook/symbols/headers.requirements.txt
$(BUILD)/symbols.json: $(HOOK_SYMBOLS_SRC)
	@$(PY) hook/symbols --build $(BUILD)

# The headers come with symbols.json, so no object is compiled before it; a new one makes all objects anew.
$(FAKEGPU_OBJ)/%.o: fakegpu/src/%.c fakegpu/build.mk $(BUILD)/symbols.json
	@mkdir -p $(@D)
	@echo "cc $<"
	@$(CC) $(FAKEGPU_CFLAGS) -c -o $@ $<

# $(1) cuda or nvml, $(2) objects. `done` is made whenever an object changes; what gen wrote keeps its time where its
# text stayed the same.
define FAKEGPU_GENERATE
$(FAKEGPU_GEN)/$(1)_done: $(2) $(BUILD)/symbols.json $(wildcard fakegpu/gen/*)
	@$(PY) fakegpu/gen --symbols $(BUILD)/symbols.json --out $(FAKEGPU_GEN) $(1) $(2)
$(addprefix $(FAKEGPU_GEN)/$(1)_,stubs.c symtab.c $(foreach f,$(FAKEGPU_FLAVOURS),flavour_$(f).c $(f).map $(f).list)): \
		$(FAKEGPU_GEN)/$(1)_done ;
endef
$(eval $(call FAKEGPU_GENERATE,cuda,$(FAKEGPU_CUDA_OBJ)))
$(eval $(call FAKEGPU_GENERATE,nvml,$(FAKEGPU_NVML_OBJ)))

$(FAKEGPU_GEN)/%.o: $(FAKEGPU_GEN)/%.c
	@$(CC) $(FAKEGPU_CFLAGS) -c -o $@ $<

# $(1) flavour, $(2) libcuda or libnvidia-ml, $(3) cuda or nvml, $(4) objects. Linked beside and renamed, so that a
# program that has the old library mapped goes on with it.
define FAKEGPU_LIBRARY
$(FAKEGPU_OBJ)/$(1)/$(2).so: $(4) $(FAKEGPU_GEN)/$(3)_$(1).map
	@mkdir -p $$(@D)
	@echo "ld $$@"
	@$(CC) $(FAKEGPU_LDFLAGS) -Wl,-soname,$(2).so.1 -Wl,--version-script=$(FAKEGPU_GEN)/$(3)_$(1).map \
		-o $$@.new $(4) -ldl -lpthread -lm && mv -f $$@.new $$@
endef
$(foreach f,$(FAKEGPU_FLAVOURS),$(eval $(call FAKEGPU_LIBRARY,$(f),libcuda,cuda,$(FAKEGPU_CUDA_OBJ) \
	$(addprefix $(FAKEGPU_GEN)/,cuda_stubs.o cuda_symtab.o cuda_flavour_$(f).o))))
$(foreach f,$(FAKEGPU_FLAVOURS),$(eval $(call FAKEGPU_LIBRARY,$(f),libnvidia-ml,nvml,$(FAKEGPU_NVML_OBJ) \
	$(addprefix $(FAKEGPU_GEN)/,nvml_stubs.o nvml_flavour_$(f).o))))

$(FAKEGPU_OBJ)/nvidia-smi: $(FAKEGPU_SMI_OBJ)
	@echo "ld $@"
	@$(CC) -o $@.new $^ -ldl && mv -f $@.new $@
$(FAKEGPU_OBJ)/nvidia-cuda-mps-control: $(FAKEGPU_MPS_OBJ)
	@echo "ld $@"
	@$(CC) -o $@.new $^ && mv -f $@.new $@

FAKEGPU_TOOLS := $(FAKEGPU_OBJ)/nvidia-smi $(FAKEGPU_OBJ)/nvidia-cuda-mps-control

# One driver root for each flavour; the full one is called build/fakegpu.
fakegpu_root = $(BUILD)/fakegpu$(if $(filter-out 580,$(1)),-$(1))
define FAKEGPU_ROOT
$(call fakegpu_root,$(1))/.made: $(FAKEGPU_OBJ)/$(1)/libcuda.so $(FAKEGPU_OBJ)/$(1)/libnvidia-ml.so $(FAKEGPU_TOOLS) \
		$(FAKEGPU_OBJ)/580/libnvidia-ml.so fakegpu/gen/flavours.py fakegpu/make_root.py fakegpu/config/default.json
	@$(PY) fakegpu/make_root.py --build $(BUILD) --flavour $(1) --config fakegpu/config/default.json \
		$(call fakegpu_root,$(1)) && touch $$@
fakegpu: $(call fakegpu_root,$(1))/.made
endef
$(foreach f,$(FAKEGPU_FLAVOURS),$(eval $(call FAKEGPU_ROOT,$(f))))

include fakegpu/tools/tools.mk

-include $(wildcard $(FAKEGPU_OBJ)/*.d $(FAKEGPU_GEN)/*.d)
