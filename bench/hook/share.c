/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that wants all of a card: launches kernels of one length, of one kind, as fast as it may, and
 * says what part of the time the card was its. Prints one line of JSON.
 *
 *   share KIND MICROSECONDS SECONDS [START_NS [SETTLE_SECONDS]]
 *
 * KIND: kernel, ex, cooperative, multi, graph (ten kernels), thread (per-thread stream), streams (four in
 * turn), sync (waits after each). The figures: `share` over the whole time, `worst` and `best` of any second
 * (steps of 100 ms), `stall_ms` the longest that one launch took. What goes on in the first SETTLE_SECONDS is
 * in none of them but `first_stall_ms`; all programs of a comparison then run for longer than that.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
	unsigned grid[3], block[3], shared;
	void *stream, *attrs;
	unsigned count;
} launch_config;

typedef struct {
	void *function;
	unsigned grid[3], block[3], shared;
	void *stream;
	void **params;
} launch_params;

static void *library;

static void *need(const char *name)
{
	void *symbol = dlsym(library, name);
	if (symbol == NULL) {
		fprintf(stderr, "share: no %s\n", name);
		exit(2);
	}
	return symbol;
}

#define FN(result, name, ...) ((result (*)(__VA_ARGS__))need(name))

static void check(int rc, const char *what)
{
	if (rc != 0) {
		fprintf(stderr, "share: %s: %d\n", what, rc);
		exit(3);
	}
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#define GRAPH_KERNELS 10
#define STEP_NS       100000000u
#define STEPS         1024

static int (*kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
		     void **, void **);
static int (*kernel_thread)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
			    void *, void **, void **);
static int (*cooperative)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
			  void *, void **);
static int (*multi)(launch_params *, unsigned, unsigned);
static int (*ex)(const launch_config *, void *, void **, void **);
static int (*graph)(void *, void *);
static int (*synchronize)(void *);

static void *function, *exec, *stream[4];

static void make_graph(void)
{
	void *made;
	check(FN(int, "cuStreamBeginCapture_v2", void *, int)(stream[0], 0), "begin capture");
	for (int i = 0; i < GRAPH_KERNELS; i++)
		check(kernel(function, 1, 1, 1, 1, 1, 1, 0, stream[0], NULL, NULL), "capture");
	check(FN(int, "cuStreamEndCapture", void *, void **)(stream[0], &made), "end capture");
	check(FN(int, "cuGraphInstantiateWithFlags", void **, void *, unsigned long long)(&exec, made, 0),
	      "instantiate");
	graph = FN(int, "cuGraphLaunch", void *, void *);
}

static int launch(const char *kind, unsigned turn)
{
	launch_config config = {{1, 1, 1}, {1, 1, 1}, 0, stream[0], NULL, 0};
	launch_params params = {function, {1, 1, 1}, {1, 1, 1}, 0, stream[0], NULL};
	int rc;
	switch (kind[0]) {
	case 'k':
		return kernel(function, 1, 1, 1, 1, 1, 1, 0, stream[0], NULL, NULL);
	case 'e':
		return ex(&config, function, NULL, NULL);
	case 'c':
		return cooperative(function, 1, 1, 1, 1, 1, 1, 0, stream[0], NULL);
	case 'm':
		return multi(&params, 1, 0);
	case 'g':
		return graph(exec, stream[0]);
	case 't':
		return kernel_thread(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
	case 'n':
		return kernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
	default:
		rc = kernel(function, 1, 1, 1, 1, 1, 1, 0, stream[kind[1] == 't' ? turn % 4 : 0], NULL, NULL);
		return rc || kind[1] == 't' ? rc : synchronize(stream[0]);
	}
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	const char *kind = argv[1];
	uint64_t length = strtoull(argv[2], NULL, 10) * 1000, wanted = (uint64_t)(atof(argv[3]) * 1e9);
	void *context, *module;
	char name[64];
	library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	if (library == NULL) {
		fprintf(stderr, "share: %s\n", dlerror());
		return 2;
	}
	check(FN(int, "cuInit", unsigned)(0), "init");
	check(FN(int, "cuCtxCreate_v2", void **, unsigned, int)(&context, 0, 0), "context");
	check(FN(int, "cuModuleLoadData", void **, const void *)(&module, "share"), "module");
	snprintf(name, sizeof(name), "spin_us_%s", argv[2]);
	check(FN(int, "cuModuleGetFunction", void **, void *, const char *)(&function, module, name),
	      "function");
	for (int i = 0; i < 4; i++)
		check(FN(int, "cuStreamCreate", void **, unsigned)(&stream[i], 1), "stream");
	*(void **)&kernel = need("cuLaunchKernel");
	*(void **)&kernel_thread = need("cuLaunchKernel_ptsz");
	*(void **)&cooperative = need("cuLaunchCooperativeKernel");
	*(void **)&ex = need("cuLaunchKernelEx");
	*(void **)&synchronize = need("cuStreamSynchronize");
	if (kind[0] == 'm')
		*(void **)&multi = need("cuLaunchCooperativeKernelMultiDevice");
	if (kind[0] == 'g') {
		make_graph();
		length *= GRAPH_KERNELS;
	}
	if (argc > 4)
		while (now() < strtoull(argv[4], NULL, 10))
			nanosleep(&(struct timespec){0, 1000000}, NULL);

	static uint64_t step[STEPS];
	uint64_t begin = now(), before = begin, longest = 0, longest_at = 0, count = 0, turn = 0, first = 0;
	uint64_t settled = begin + (argc > 5 ? (uint64_t)(atof(argv[5]) * 1e9) : 0);
	while (before - begin < wanted) {
		if (settled > begin && before >= settled) {
			first = longest;
			longest = longest_at = count = 0;
			memset(step, 0, sizeof(step));
			begin = before;
		}
		check(launch(kind, (unsigned)turn++), "launch");
		uint64_t after = now();
		if (after - before > longest) {
			longest = after - before;
			longest_at = before - begin;
		}
		before = after;
		count++;
		uint64_t at = (after - begin) / STEP_NS;
		if (at < STEPS)
			step[at]++;
	}
	uint64_t launched = now();
	check(FN(int, "cuCtxSynchronize", void)(), "synchronize");
	uint64_t end = now();
	/* What was queued before the count began ran in place of what is queued when it ends. */
	double counted = (double)((argc > 5 ? launched : end) - begin), worst = 1e9, best = 0;
	uint64_t worst_at = 0;
	/* The first second holds what an idle share had saved up. */
	for (uint64_t i = 0; (i + 10) * STEP_NS <= launched - begin && i + 10 < STEPS; i++) {
		uint64_t sum = 0;
		for (int j = 0; j < 10; j++)
			sum += step[i + j];
		double part = (double)sum * (double)length / 1e7;
		if (part < worst) {
			worst = part;
			worst_at = i;
		}
		best = part > best ? part : best;
	}
	printf("{\"kind\": \"%s\", \"us\": %s, \"launches\": %llu, \"share\": %.2f, \"worst\": %.2f, "
	       "\"worst_at_s\": %.1f, \"best\": %.2f, "
	       "\"stall_ms\": %.2f, \"first_stall_ms\": %.2f, \"stall_at_s\": %.2f, \"queued_ms\": %.2f, "
	       "\"seconds\": %.2f}\n",
	       kind, argv[2], (unsigned long long)count, 100.0 * (double)count * (double)length / counted,
	       worst, (double)worst_at / 10, best, (double)longest / 1e6, (double)first / 1e6,
	       (double)longest_at / 1e9, (double)(end - launched) / 1e6, (double)(end - begin) / 1e9);
	return 0;
}
