# SPDX-License-Identifier: Apache-2.0
#
# Programs around the fake driver, into build/fakegpu-tools/: fakegpuctl (the hand that reaches into the machine),
# cuda-probe and cuda-probe-linked (a small CUDA program that does what it is told), cuda-bench (what calls cost).
# Included by fakegpu/build.mk.

FAKEGPU_TOOLS_OUT := $(BUILD)/fakegpu-tools
FAKEGPU_TOOLS_CFLAGS := -std=c11 -O2 -g $(FAKEGPU_WARNINGS) -Wno-pedantic

.PHONY: fakegpu-tools
fakegpu-tools: $(addprefix $(FAKEGPU_TOOLS_OUT)/,fakegpuctl cuda-probe cuda-probe-linked cuda-bench)
fakegpu: fakegpu-tools

$(FAKEGPU_TOOLS_OUT)/fakegpuctl: fakegpu/tools/fakegpuctl.c fakegpu/tools/ctl_status.c $(call fakegpu_objects,$(FAKEGPU_SHARED_SRC))
	@mkdir -p $(@D)
	@$(CC) $(filter-out -MMD -MP,$(FAKEGPU_CFLAGS)) -Ifakegpu/tools -o $@.new $^ -lpthread && mv -f $@.new $@

FAKEGPU_PROBE_SRC := fakegpu/tools/cuda_probe.c fakegpu/tools/probe_driver.c
$(FAKEGPU_TOOLS_OUT)/cuda-probe: $(FAKEGPU_PROBE_SRC) fakegpu/tools/probe_driver.h
	@mkdir -p $(@D)
	@$(CC) $(FAKEGPU_TOOLS_CFLAGS) -o $@.new $(FAKEGPU_PROBE_SRC) -ldl && mv -f $@.new $@

# Linked to the driver as programs are, by its name and not by its place.
$(FAKEGPU_TOOLS_OUT)/cuda-probe-linked: $(FAKEGPU_PROBE_SRC) fakegpu/tools/probe_driver.h $(FAKEGPU_OBJ)/580/libcuda.so
	@mkdir -p $(@D)
	@$(CC) $(FAKEGPU_TOOLS_CFLAGS) -DLINKED -o $@.new $(FAKEGPU_PROBE_SRC) -Wl,--no-as-needed \
		$(FAKEGPU_OBJ)/580/libcuda.so -ldl && mv -f $@.new $@

$(FAKEGPU_TOOLS_OUT)/cuda-bench: fakegpu/tools/cuda_bench.c $(BUILD)/symbols.json
	@mkdir -p $(@D)
	@$(CC) $(FAKEGPU_TOOLS_CFLAGS) -D_GNU_SOURCE -isystem $(BUILD)/headers/13 -o $@.new $< -ldl && mv -f $@.new $@
